"""`Critic`: the value model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Unpack

from verl._base.checked import checked
from verl._base.record import Seed
from verl._host.log import follow_log_level
from verl._host.ranks import registry
from verl.algorithms import BaseAlgorithm, default_algorithm, make_algorithm
from verl.batch import Batch
from verl.data.alignment import CharacterAlignment
from verl.data.chat import ChatTokenizer
from verl.data.text import spelled, tokenizer_of, vocabulary_id, written_turns
from verl.errors import ConfigError, ModelError
from verl.models.heads import ValueModel
from verl.models.loading import as_tokenizer
from verl.models.options import ModelOptions
from verl.models.portable import unwrapped
from verl.roles.columns import add_rewards, as_sequences
from verl.roles.handle import H, ModelHandle, P
from verl.roles.settings import as_name, read_settings
from verl.training.options import OptimConfig, TrainOptions
from verl.workers.critic import CriticWorker
from verl.workers.update import MiniBatchPlan, TaskLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from verl.cluster.group import RankGroup
    from verl.keywords import CriticKeywords
    from verl.models.source import ModelFiles, ModelSource
    from verl.roles.actor import Actor


class Critic(ModelHandle[CriticWorker]):
    """A value model: predicts the value of the state before each response token, and learns it.

    It may be smaller than the actor, of another architecture, or read another vocabulary. In the last case the text is
    re-encoded for the critic, and the value of an actor's token is the critic's value at the position of the token's
    first character (the returns are carried the other way likewise).

    Args:
        model: a model of transformers, whose backbone gets a value head, or the name or directory of one; wrapped for
            sharded training, as of `Actor`.
        tokenizer: the critic's own; None: it reads the actor's token ids.
        actor_tokenizer: the actor's, for sequences without the column `tokenizer` (recorded ones); trainers give it.
        algorithm: supplies the value loss and the returns of `update`; None: PPO's.
        strategy, train, placement, optim, fused_kernels, seed, **settings: as of `Actor`.

    Raises:
        ConfigError: a setting is unknown, of the wrong type or out of range.
        ModelError: the model cannot be found or used.
    """

    @checked
    def __init__(
        self,
        model: PreTrainedModel | ValueModel | ModelOptions | str,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        *,
        train: TrainOptions | Mapping[str, Any] | None = None,
        strategy: Any = None,
        placement: Any = None,
        actor_tokenizer: PreTrainedTokenizerBase | None = None,
        algorithm: str | BaseAlgorithm | None = None,
        optim: OptimConfig | Mapping[str, Any] | Any = None,
        fused_kernels: bool | str | None = None,
        seed: Seed = 0,
        **settings: Unpack[CriticKeywords],
    ) -> None:
        follow_log_level()
        model, tokenizer = as_name(model), as_name(tokenizer)
        self.train_options, (loading, training) = read_settings(
            "Critic", settings, model, train, optim, strategy, fused_kernels
        )
        #: "critic" or "cost_critic": which pool of the placement it stands on.
        self.role = "critic"
        self.set_placement(placement)
        self._read_model(loading, "value", seed, lambda: _value_model(model))
        self.algorithm = default_algorithm() if algorithm is None else make_algorithm(algorithm)
        self.plan = MiniBatchPlan(training.mini_batch_size, training.epochs, seed=seed)
        tokenizer = loading.tokenizer if tokenizer is None else tokenizer
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        #: For sequences without a column `tokenizer`; trainers set it.
        self.actor_tokenizer = actor_tokenizer
        #: Id of an actor's vocabulary -> how its tokens are re-encoded.
        self._alignments: dict[str, CharacterAlignment] = {}
        registry.add("Critic", model=self.modules, algorithm=self.algorithm, optimizer=self.train_options.optimizer)

    @classmethod
    def from_pretrained(cls: Callable[Concatenate[str, P], H], name: str, *args: P.args, **options: P.kwargs) -> H:
        """The critic over a model by name or directory, with that model's own tokenizer."""
        if not args:
            options.setdefault("tokenizer", name)
        return cls(name, *args, **options)

    @property
    def model(self) -> ValueModel:
        """The model; without weights where workers in other processes have it."""
        return self.modules  # type: ignore[no-any-return]

    def _make_group(self, source: ModelSource) -> RankGroup[CriticWorker]:
        recipe = partial(CriticWorker, source, self.train_options)
        return self.controller.group(self.role, recipe, self.train_options, self.modules)

    def compute_values(self, sequences: Batch) -> Batch:
        """Column `values`, aligned with `response_tokens`: the value of the state before each token.

        Raises:
            ConfigError: the sequences are in another vocabulary, and their tokenizer is not known here.
        """
        sequences = as_sequences(sequences)
        alignment = self._alignment(sequences)
        if alignment is None:
            return self.group.call(CriticWorker.values, sequences)
        values = self.group.call(CriticWorker.values, alignment.batch(sequences))["values"]
        return Batch.from_columns({"values": alignment.to_actor(sequences, values)})

    def update(self, sequences: Batch, rewards: Any) -> dict[str, float]:
        """Learn the returns of scored sequences; values that `sequences` lacks are computed first."""
        batch = add_rewards(sequences, rewards)
        if "values" not in batch:
            batch = batch.add(self.compute_values(batch))
        prepared, _ = self.algorithm.prepare(batch)
        return self.train(prepared, self.algorithm)

    def train(self, prepared: Batch, algorithm: BaseAlgorithm, role: str = "critic") -> dict[str, float]:
        """Optimizer steps on a batch that `algorithm.prepare` made."""
        objective = algorithm.objective(role)
        if (alignment := self._alignment(prepared)) is not None:
            prepared = alignment.to_critic(prepared, objective.loss_needs.columns)
        return self.group.call(CriticWorker.update, [TaskLoss(prepared, objective)], self.plan)

    def _alignment(self, sequences: Batch) -> CharacterAlignment | None:
        """How the sequences are re-encoded for the critic's tokenizer; None: not at all."""
        if self.tokenizer is None:
            return None
        actor = tokenizer_of(sequences) or self.actor_tokenizer
        if actor is None:
            self._check_texts(sequences)
            return None
        spelling = vocabulary_id(actor)
        if spelling == vocabulary_id(self.tokenizer):
            return None
        if spelling not in self._alignments:
            self._alignments[spelling] = CharacterAlignment(actor, self.tokenizer)
        return self._alignments[spelling]

    def _check_texts(self, sequences: Batch) -> None:
        """Raises ConfigError if the first responses, read by the critic's tokenizer, are not their own texts."""
        if self.tokenizer is None or "response" not in sequences:
            return
        first = sequences.slice(0, 8)
        read = ["\n".join(spelled(self.tokenizer, turn) for turn in turns) for turns in written_turns(first)]
        # A response's text has no ends and padding, and which tokens those are is the actor's affair.
        added = ChatTokenizer(self.tokenizer).added
        names = [["\n", *(added[t] for t in {*tokens} if t in added)] for tokens in first["response_tokens"]]
        rows = [row for row in zip(read, first["response"], names, strict=True) if row[1]]
        bare = [[re.sub("|".join(map(re.escape, some)), "", text) for text in texts] for *texts, some in rows]
        if rows and not any(text == response for text, response in bare):
            raise ConfigError(
                f"the critic's tokenizer reads {rows[0][0][:50]!r} where the response is {rows[0][1][:50]!r}: "
                "the actor has another. Give Critic(..., actor_tokenizer=actor.tokenizer) for values to be carried over"
            )


def _value_model(model: Any) -> ValueModel:
    """The model without a caller's wrapper, under a value head."""
    plain = unwrapped(model, together=not registry.is_closed)
    if isinstance(plain, ValueModel):
        return plain
    if not hasattr(plain, "base_model"):
        raise ModelError(f"{type(plain).__name__} is no model of transformers: give an AutoModel, or its name")
    return ValueModel.from_model(plain)


def as_critic(critic: Any) -> Critic | None:
    """A critic from a critic, a model, or a model's name or directory.

    Raises:
        ModelError: no critic can be made of it.
    """
    if critic is None or isinstance(critic, Critic):
        return critic
    try:
        return Critic.from_pretrained(critic) if isinstance(critic, str) else Critic(critic)
    except ModelError as error:
        raise ModelError(f"critic: {error}") from error


def critic_like(
    handle: Actor | Critic,
    files: ModelFiles | None,
    model: Callable[[], Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Critic:
    """A critic with the training options and devices of `handle`, over these files or, if None, a copy of the model."""
    options = handle.train_options
    return Critic(
        copy.deepcopy(model())
        if files is None
        else ModelOptions(
            path=files.path,
            dtype=files.dtype,
            trust_remote_code=files.trust_remote_code,
            max_position_embeddings=files.positions,
        ),
        tokenizer,
        train=options,
        optim=options.optim or OptimConfig(),
        gradient_checkpointing=options.gradient_checkpointing,
        fused_kernels=options.fused_kernels,
        use_remove_padding=options.remove_padding,
        placement=handle.controller,
        seed=handle.plan.seed,
    )
