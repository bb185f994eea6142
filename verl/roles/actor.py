"""`Actor`: the policy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack
from uuid import uuid4

from verl._base.checked import checked
from verl._base.combinations import check
from verl._base.names import disjoint
from verl._base.record import Count, Seed
from verl._host import device
from verl._host.log import follow_log_level
from verl._host.ranks import registry
from verl.algorithms import BaseAlgorithm, default_algorithm, make_algorithm
from verl.batch import Batch
from verl.data.chat import ChatTokenizer
from verl.data.text import ResponseText, vocabulary_id
from verl.data.tokenize import to_prompts, with_prefixes
from verl.errors import ConfigError, ModelError
from verl.models.heads import ValueModel
from verl.models.loading import as_tokenizer, check_vocabulary, eos_token_ids, find_tokenizer
from verl.models.lora import has_adapters, reference_weights
from verl.models.options import ModelOptions
from verl.models.portable import PortableModel, empty_copy
from verl.models.rope import position_limits
from verl.models.source import ModelSource
from verl.roles.columns import add_rewards, aligned, expand, temperature_of
from verl.roles.handle import ModelHandle
from verl.roles.reads import model_outputs, prepare, with_model_outputs
from verl.roles.reference import Reference, live_model
from verl.roles.settings import as_name, read_settings, sampler_options, with_engine
from verl.rollout.base import SamplingParams, as_sampling
from verl.rollout.options import RolloutOptions
from verl.training.options import OptimConfig, TrainOptions
from verl.weights.shard import Shard
from verl.weights.shards import load_model_shards
from verl.workers.actor import (
    ActorWorker,
    EngineFactory,
    ReferenceWorker,
    engine_factory,
    load_episode,
)
from verl.workers.update import MiniBatchPlan, TaskLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from verl.cluster.group import RankGroup
    from verl.keywords import ActorKeywords
    from verl.rollout.episode import Episode

logger = logging.getLogger(__name__)


class Actor(ModelHandle[ActorWorker]):
    """A policy: generates, scores and learns.

    Args:
        model: a causal language model of transformers (or a `ValueModel`, to go on with a score head), or the name or
            directory of one. A `PeftModel` trains its adapters only. A model wrapped in `FullyShardedDataParallel` or
            `fully_shard` on every rank of the job is copied and trained in our own layout (see
            `verl.models.portable`): read the result from `Actor.model`.
        tokenizer: a tokenizer, or its name or directory; default: the model's.
        strategy: `train.strategy`; None leaves it as it is.
        train: `TrainOptions`, or a mapping of its fields.
        placement: where it runs, see `DeviceMesh`: "cpu:0-1", {"actor": "cuda:0-3", "rollout": "cuda:4-7"}, a
            `Controller`, or None for this process (under torchrun: all ranks).
        algorithm: what `update` optimises: a name or an instance of an algorithm. None: PPO when `update` is given
            values, else GRPO where every prompt has several samples, else REINFORCE++ (a whitened batch baseline).
        optim: `OptimConfig`, a mapping of its fields, your own `torch.optim.Optimizer` over the model's parameters, or
            a function that makes one of a list of parameters (where weights are sharded, of their shards).
        rollout: the engine that generates: "auto" (vLLM on a GPU where it is installed and can do what is set, else
            embedded), "embedded" (on the very tensors that are trained), "hf", "vllm", a function or class that makes a
            `RolloutEngine`, "FILE.py:NAME" of one, or `RolloutOptions`.
        episode: `async episode(client, row)`, what happens between a prompt and its response (several turns, tools,
            constraints), a class of TRL's form of environments, or "FILE.py:NAME" of one; None: a single turn.
        sampling: `SamplingParams`, or a mapping of its fields; keywords of `generate_sequences` override it
            call by call.
        fused_kernels: run the layers by fused kernels where there are some; "compiled" are ours, for CPU; for any other
            name the nearest are taken, with a warning.
        head: "score" trains a reward model, with one scalar per row, instead of a language model.
        **settings: fields of `TrainOptions` (mini_batch_size, epochs, use_amp, ...), `RolloutOptions` (max_num_seqs,
            batch_invariant, ...) or `ModelOptions` (dtype, lora, ...); `gradient_checkpointing`,
            `tensor_parallel_size`.
        seed: with a sample's id it fixes the sample's randomness.

    Raises:
        ConfigError: a setting is unknown, of the wrong type or out of range.
        ModelError: the model or its tokenizer cannot be found or used.
    """

    modules: PreTrainedModel
    #: Whether ranks have parts of the model that was given; `modules` has no weights then.
    is_cut = False

    @checked
    def __init__(
        self,
        model: PreTrainedModel | ValueModel | ModelOptions | str,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        strategy: Any = None,
        *,
        train: TrainOptions | Mapping[str, Any] | None = None,
        placement: Any = None,
        algorithm: str | BaseAlgorithm | None = None,
        optim: OptimConfig | Mapping[str, Any] | Any = None,
        rollout: str | EngineFactory | RolloutOptions = "auto",
        episode: Any = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        fused_kernels: bool | str | None = None,
        head: Literal["lm", "score"] = "lm",
        seed: Seed = 0,
        **settings: Unpack[ActorKeywords],
    ) -> None:
        follow_log_level()
        model, tokenizer = as_name(model), as_name(tokenizer)
        generating = sampler_options(rollout, episode, seed)
        if generating.name != "auto":
            engine_factory(generating.name)  # a misspelt engine is refused before a model is read
        self.train_options, (loading, training, self.rollout_options) = read_settings(
            "Actor", settings, model, train, optim, strategy, fused_kernels, generating
        )
        self.sampling = as_sampling(sampling, SamplingParams(**self.rollout_options.sampling))
        self.algorithm = None if algorithm is None else make_algorithm(algorithm)
        samples = self.algorithm is None or self.algorithm.online
        self.plan = MiniBatchPlan(
            training.mini_batch_size, training.epochs, (samples and self.sampling.temperature) or 1.0, seed
        )
        self.head = head
        self.set_placement(placement)
        # A score model stands in a language model's place: all but its engine read only what both have.
        kind: Literal["causal", "score"] = "causal" if head == "lm" else "score"
        self._read_model(loading, kind, seed, lambda: live_model(model, head))
        names = [name for name in (tokenizer, loading.tokenizer, loading.path) if name is not None]
        self.tokenizer = as_tokenizer(names[0]) if names else find_tokenizer(self.modules)
        check_vocabulary(self.modules, self.tokenizer)
        played = load_episode(self.rollout_options.episode)
        #: The episode's tools, as chat templates show them; whether it masks what may be sampled.
        self.tools: list[dict[str, Any]] = list(getattr(played, "schemas", ()))
        self.masks = bool(getattr(played, "masks", False))
        #: The default episode if it computes rewards itself, as environments and agents do.
        self.rewarding_episode: Episode | None = played if getattr(played, "gives_reward", False) else None
        if (check_tokenizer := getattr(played, "check_tokenizer", None)) is not None:
            check_tokenizer(self.tokenizer)
        self.reference = Reference(reference_weights(self.modules) if head == "lm" else {})
        self._keeps_start = False
        #: Updates so far.
        self.policy_version = 0
        #: Stamp of the weights as they are, and as they were at first: no other weights, of this actor or another, have
        #: the same.
        self.policy_id = self.first_id = uuid4().hex
        self._calls = 0
        registry.add(
            "Actor",
            model=self.modules,
            tokenizer=self.tokenizer,
            algorithm=self.algorithm,
            optimizer=self.train_options.optimizer,
            rollout=None if isinstance(rollout, str) else rollout,
            episode=None if isinstance(episode, str) else episode,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The trained model itself if this process holds all of it, or a copy with the current weights if it is sharded
        over ranks. A model that workers in other processes loaded by name has no weights here: see `present_model`."""
        return self.present_model() if self.is_cut else self.modules

    @property
    def device(self) -> str:
        """The device of the model in this process, or the one it will have once its workers are made."""
        if self.files is not None or self.is_cut:
            return self.controller.device
        return device.of(self.modules) if self.has_workers else device.target(self.modules, self.controller.device)

    def resolve_engine(self) -> Any:
        """The rollout engine, a name or a factory. "auto" is resolved at the first call, by device and options."""
        self.rollout_options = with_engine(self.rollout_options, self.modules, self.device)
        return self.rollout_options.name

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a response, see `eos_token_ids`."""
        ends, turn_end = eos_token_ids(self.modules, self.tokenizer), ChatTokenizer(self.tokenizer).turn_end
        if turn_end in ends and turn_end not in (*eos_token_ids(self.modules), self.tokenizer.eos_token_id):
            logger.info("generation also stops at %s, with which the chat template ends a reply", turn_end)
        return ends

    def _make_group(self, source: ModelSource) -> RankGroup[ActorWorker]:
        self.resolve_engine()
        recipe = partial(
            ActorWorker,
            source,
            self.tokenizer,
            self.ends,
            self.train_options,
            self.rollout_options,
            head=self.head,
        )
        rollout = self.rollout_options if self.head == "lm" else None
        group = self.controller.group(self.role, recipe, self.train_options, self.modules, rollout)
        layout = self.controller.meshes(self.role, self.train_options)["train"].layout
        self.is_cut = self.files is None and self.controller.executor == "torchrun" and not layout.is_plain
        if self.is_cut:
            self.modules = empty_copy(self.modules, "meta")
        return group

    def prompts(self, prompts: Any, key: str | None = None) -> Batch:
        """Prompts as a batch with `prompt_tokens`, `group` and `id`.

        Args:
            prompts: strings (encoded as they are), chats (lists of messages, through the chat template), lists of
                token ids, mappings with a column `prompt`, or a `Batch`.
            key: begins the ids, and so fixes the randomness; None: the number of this call.
        """
        if key is None:
            key = f"c{self._calls}"
            self._calls += 1
        batch = to_prompts(self.tokenizer, prompts, self.tools)
        if "group" not in batch:
            batch = batch.add({"group": [f"{key}.{row}" for row in range(len(batch))]})
        return batch

    def prefixed(self, batch: Batch, algorithm: BaseAlgorithm) -> Batch:
        """Prompts, or samples that `algorithm.prepare` made, with the texts that the algorithm puts before prompts.

        Raises:
            DataError: see `with_prefixes`.
        """
        prefixes = algorithm.prompt_prefixes(batch)
        return batch if prefixes is None else with_prefixes(self.tokenizer, batch, prefixes)

    @checked
    def generate_sequences(self, prompts: Any, *, n: Count = 1, key: str | None = None, **sampling: Any) -> Batch:
        """Sample `n` responses to each prompt.

        Args:
            prompts: see `prompts`.
            n: samples a prompt.
            key: begins the samples' ids, and so fixes their randomness.
            **sampling: fields of `SamplingParams` (max_new_tokens, temperature, top_p, stop, ...).

        Returns:
            One row per sample (with episodes, per trajectory), the samples of a prompt adjacent: the prompts' columns
            and `response_tokens`, `response_mask`, `rollout_log_probs`, `response`, `finish`, `policy_version`,
            `tokenizer`; `temperature` if it differs from the actor's.
        """
        params = as_sampling(sampling, self.sampling)
        batch = self.prompts(prompts, key)
        rows = expand(batch if self.algorithm is None else self.prefixed(batch, self.algorithm), n)
        chunks = list(self.rollout(rows, params))
        done = Batch.concat(chunks)
        position = {id_: number for number, id_ in enumerate(rows["id"])}
        samples = done["episode" if "episode" in done else "id"]
        return done.take(sorted(range(len(done)), key=lambda row: position[samples[row]]))

    def set_episode(self, task: str, episode: Episode) -> None:
        """Set a task's own episode.

        Raises:
            ConfigError: the workers have been made already; or it has tools, which the chat template would show for the
                prompts of all tasks.
        """
        if self._group is not None:
            raise ConfigError(f"the actor's workers are in place: give task '{task}' its episode before the first call")
        if getattr(episode, "schemas", ()):
            raise ConfigError(f"task '{task}': an episode with tools is the actor's: give it Actor(episode=...)")
        if (check := getattr(episode, "check_tokenizer", None)) is not None:
            check(self.tokenizer)
        options = self.rollout_options
        self.rollout_options = options.replace(episodes={**options.episodes, task: episode})

    def rollout(self, rows: Batch, params: SamplingParams, task: str | None = None) -> Iterator[Batch]:
        """Sample the rows that `expand` made; yields groups as they finish, with decoded text, and `temperature` if it
        differs from the actor's."""
        check({"responses": "responses", self.head: self.head})
        other = params.temperature not in (0, self.plan.temperature)
        longest = max(rows.lengths("prompt_tokens"), default=0)
        for positions, reason in position_limits(self.modules.config, self.resolve_engine() == "embedded"):
            if longest + params.max_new_tokens > positions:
                wanted = params.max_new_tokens
                end = f"responses to prompts of up to {longest} tokens end before max_new_tokens={wanted}"
                logger.warning("%s: the model has %d positions%s", end, positions, reason)
        if not self._keeps_start and self.asks_start:
            self.group.call(ActorWorker.keep_start, self.reference.starting_engine(self))
            self._keeps_start = True
        for chunk in self.group.call(ActorWorker.generate, rows, params, task):
            samples = self.with_policy_version(chunk)
            yield samples.add({"temperature": [float(params.temperature)] * len(samples)}) if other else samples

    @property
    def asks_start(self) -> bool:
        """Whether an episode samples from the initial weights."""
        options = self.rollout_options
        return any(getattr(load_episode(e), "asks_start", False) for e in (options.episode, *options.episodes.values()))

    def with_policy_version(self, samples: Batch, writer: tuple[int, str] | None = None) -> Batch:
        """Add the decoded text (`response`, `last_turn`) and its origin (`tokenizer`, `policy_id`) to new samples.

        Args:
            writer: version and id of the current weights; None: the actor's. `policy_id` is null in samples that
                older weights began.
        """
        texts = ResponseText(self.tokenizer, self.ends).columns(samples)
        version, policy_id = writer or (self.policy_version, self.policy_id)
        writers = [policy_id if v == version else None for v in samples["policy_version"]]
        vocabulary = [vocabulary_id(self.tokenizer)] * len(samples)
        return samples.add({**texts, "policy_id": writers, "tokenizer": vocabulary})

    def compute_log_probs(self, sequences: Batch) -> Batch:
        """Column `log_probs`: log-probs of the response tokens under the policy as it is now."""
        return self.group.call(ActorWorker.log_probs, sequences, temperature_of(sequences, self.plan.temperature))

    def compute_ref_log_probs(self, sequences: Batch) -> Batch:
        """Column `ref_log_probs`: the same under the reference policy, the actor as it was when
        `make_reference` was called, or at the first use of this call; of an actor with adapters, without these."""
        self.make_reference()
        temperature = temperature_of(sequences, self.plan.temperature)
        if self.reference.model is None:
            return self.group.call(ActorWorker.log_probs, sequences, temperature, adapters=False)
        if self._reference is None:
            if not self.controller.is_local:  # while the model is whole: workers of this process may cut it
                _ = self.reference.digest
            source = self.reference.files or PortableModel(self.reference.model)
            recipe = partial(ReferenceWorker, source, self.train_options)
            frozen = self.train_options.frozen()
            self._reference = self.controller.group("reference", recipe, frozen, self.reference.model)
        return self._reference.call(ReferenceWorker.log_probs, sequences, temperature)

    @checked
    def make_reference(self, model: PreTrainedModel | str | None = None, *, dtype: str | None = None) -> None:
        """Freeze a reference policy: a copy of the actor as it is now, or another model. A second call does nothing.

        The reference of an actor with adapters, where no other model is given, is that actor without them: it takes no
        memory.

        Args:
            model: that other model, or its name or directory.
            dtype: in which a model is loaded by name; "int4" also keeps a copy of the actor in 4 bits.

        Raises:
            ModelError: the actor has been trained already, so its first weights are gone.
            ConfigError: `dtype` is neither.
        """
        if dtype not in (None, "int4") and not isinstance(model, str):
            raise ConfigError(f"make_reference: dtype='{dtype}' is for a model by name, 'int4' for a copy, too")
        if self.reference.model is not None or (model is None and has_adapters(self.modules)):
            return
        if model is None and self.policy_version > 0:
            gone = "the actor has been updated already, so its reference weights are gone"
            raise ModelError(f"{gone}: call make_reference() before the first update")
        self.reference.freeze(self, model, dtype)

    def update(self, sequences: Batch, rewards: Any, values: Any = None) -> dict[str, float]:
        """One update from scored sequences.

        Args:
            sequences: from `generate_sequences`.
            rewards: from `get_reward`, or a number (None: abstained) a row.
            values: from `compute_values`; for algorithms with a critic.

        Returns:
            Metrics: `loss`, `grad_norm`, `lr` and the algorithm's own (`kl`, if it has a reference);
            `update/empty` if every token was rejected, so that no weight changed.
        """
        batch = add_rewards(sequences, rewards)
        if values is not None:
            batch = aligned(batch, values, "values")
        algorithm = self.algorithm or default_algorithm(batch)
        batch = with_model_outputs(algorithm, batch, model_outputs(algorithm, self, {}))
        prepared, metrics = prepare(algorithm, self, batch)
        return disjoint(f"a metric of algorithm '{algorithm.name}'", metrics, self.train(prepared, algorithm))

    def needs_old_log_probs(self, algorithm: BaseAlgorithm, batch: Batch, samples: int | None = None) -> bool:
        """Whether the log-probs before the update must be computed: not for one step on the policy's own samples,
        where they are the detached log-probs of that step, unless the engine that sampled has other numbers.

        Args:
            samples: number in the whole update; None: the batch's.
        """
        return algorithm.needs_log_probs or (
            algorithm.needs_old_log_probs and not (self._is_one_step(batch, samples) and self._rolls_out_exactly)
        )

    @cached_property
    def _rolls_out_exactly(self) -> bool:
        return self.group.call(ActorWorker.exact_rollout)

    def _is_one_step(self, batch: Batch, samples: int | None = None) -> bool:
        is_own = "policy_id" in batch and set(batch["policy_id"]) == {self.policy_id}
        return is_own and self.plan.updates(batch.samples if samples is None else samples) == 1

    def train(self, prepared: Batch, algorithm: BaseAlgorithm) -> dict[str, float]:
        """Optimizer steps on a batch that `algorithm.prepare` made."""
        return self.train_parts([self.update_part(prepared, algorithm)])

    def update_part(
        self,
        prepared: Batch,
        algorithm: BaseAlgorithm,
        *,
        samples: int | None = None,
        weight: float = 1.0,
        name: str = "",
    ) -> TaskLoss:
        """The `TaskLoss` of a batch that `algorithm.prepare` made, for `train_parts`; see `needs_old_log_probs` for
        `samples`."""
        prepared = self.prefixed(prepared, algorithm)
        first = self._is_one_step(prepared, samples)
        # The only step on the policy's own samples takes the detached log-probs of its own forward for the old ones
        # (`MiniBatch`), so that the ratio is exactly 1: with those of `prepare`, or of the engine, it would be off by
        # rounding. A column that is left out here is what tells the loss so.
        if first and not (algorithm.keeps_old_log_probs or algorithm.needs_log_probs):
            prepared = prepared.drop(["old_log_probs"])
        # The engine's log-probs are measured against the trainer's of the same weights: in such a step those of its
        # forward; else `prepare` has done it, with the log-probs from before the update.
        if not first or "log_probs" in prepared:
            prepared = prepared.drop(["rollout_log_probs"])
        temperature = temperature_of(prepared, self.plan.temperature)
        return TaskLoss(prepared, algorithm.objective("actor"), temperature, weight, name)

    def train_parts(self, parts: Sequence[TaskLoss]) -> dict[str, float]:
        """Optimizer steps on the weighted sum of several losses, each of its own samples; see `run_updates`."""
        before, self.policy_id = self.policy_id, uuid4().hex  # an update that fails may have moved the weights
        metrics = self.group.call(ActorWorker.update, [*parts], self.plan)
        if "update/empty" in metrics:  # the weights are as they were, and those that are served are these
            self.policy_id = before
            return metrics
        self.policy_version += 1
        return metrics | self.group.call(ActorWorker.sync)

    def compute_loss(self, prepared: Batch, algorithm: BaseAlgorithm) -> dict[str, float]:
        """`loss` and the metrics of an update on a prepared batch, without the update."""
        prepared = self.prefixed(prepared, algorithm).drop(["rollout_log_probs"])
        part = TaskLoss(prepared, algorithm.objective("actor"), temperature_of(prepared, self.plan.temperature))
        return self.group.call(ActorWorker.loss, part, self.plan.skip_zero_advantage_rows)

    def merged_shards(self) -> Iterator[Shard]:
        """The weights with adapters merged into them, under the base model's names."""
        return self.group.call(ActorWorker.merged_shards) if has_adapters(self.modules) else self.shards()

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """Replace the weights, those that generate included; `policy_version` counts updates, and stays."""
        self.policy_id = uuid4().hex
        super().load_shards(shards)

    def save(self, folder: str, background: bool = False) -> dict[str, Any]:
        return {**super().save(folder, background), "policy_id": self.policy_id}

    def load(self, weights: Sequence[str], optimizer: Sequence[str], meta: Mapping[str, Any]) -> None:
        rest = dict(meta)
        self.policy_id = rest.pop("policy_id")
        super().load(weights, optimizer, rest)
        self.policy_version = int(rest["policy_version"])

    @property
    def tokenizer_as_trained(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template of the default episode if that has its own."""
        chat_template = getattr(load_episode(self.rollout_options.episode), "chat_template", None)
        if chat_template is None:
            return self.tokenizer
        from verl.rollout.gateway.template import with_template

        return with_template(self.tokenizer, chat_template)

    @checked
    def save_pretrained(self, path: str | Path, *, adapter: bool = False) -> None:
        """Write a plain Hugging Face directory: weights (adapters merged into them), config and tokenizer; or
        (`adapter`) a directory of the adapters alone, which peft loads."""
        from verl.models.save import save_pretrained_dir

        save_pretrained_dir(self.present_model(), self.tokenizer_as_trained, path, adapter=adapter)

    def present_model(self) -> PreTrainedModel:
        """`model` with its current weights, fetched from the workers if they are other processes."""
        if self._group is None:
            return self.modules if self.files is None else self.files.load()
        if self.controller.is_local:
            return self.modules
        model = empty_copy(self.modules, "cpu") if self.is_cut or self.files is not None else self.modules
        load_model_shards(model, self.shards())
        return model
