"""The actor on one rank: it generates, scores and learns on one set of live tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch

from verl._base.combinations import check
from verl._base.names import check_known
from verl._host.user_functions import load_function
from verl.batch import Batch
from verl.cluster.rank_context import ALONE, ROLE, WEIGHTS, RankContext, dispatch
from verl.errors import ConfigError, shown
from verl.models.lora import has_adapters
from verl.models.packed import PackedModel
from verl.models.portable import empty_copy
from verl.models.source import ModelSource
from verl.rollout.base import Request, RolloutEngine, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.environments import as_episode
from verl.rollout.episode import Episode, outcomes
from verl.rollout.hf import HFEngine
from verl.rollout.options import ENGINES, SamplerOptions
from verl.rollout.turns import Turns, episode_rows, response_columns
from verl.training.engine import TrainEngine
from verl.training.options import EngineOptions, Head
from verl.training.ranks import gather_json
from verl.weights.shard import Shard, Stream
from verl.workers.generation import GenerationModel
from verl.workers.streams import broadcast_shards, spread
from verl.workers.sync import ROWS, SyncCheck
from verl.workers.trained import TrainedWorker, model_of_rank, train_engine
from verl.workers.update import MiniBatchPlan, TaskLoss, loss_term, run_updates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Makes a rollout engine: (model, tokenizer, eos ids, options) -> engine. A class that is made so is one, too.
EngineFactory = Callable[["PackedModel", "PreTrainedTokenizerBase", tuple[int, ...], "SamplerOptions"], RolloutEngine]


def make_rollout_engine(
    packed: PackedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...], options: SamplerOptions
) -> RolloutEngine:
    """Make the engine of these options; "embedded" falls back to "hf" for a model without a paged forward.

    Raises:
        ConfigError: no engine has that name, or it cannot do what the options say.
    """
    if (factory := engine_factory(options.name)) is not None:
        return factory(packed, tokenizer, eos_token_ids, options)
    common: Any = {"tokenizer": tokenizer, "eos_token_ids": eos_token_ids, "seed": options.seed}
    sequences, memory = options.max_num_seqs, options.kv_memory
    if options.name == "vllm":
        from verl.rollout.vllm.engine import VLLMEngine

        size = options.tensor_model_parallel_size
        common |= {"max_num_seqs": sequences, "kv_memory": memory, "tensor_parallel_size": size}
        return VLLMEngine(packed.model, device=packed.device, **common)
    if options.name == "embedded" and packed.supports_paged:
        invariant = options.batch_invariant
        return EmbeddedEngine(packed, max_batch=sequences, kv_memory=memory, batch_invariant=invariant, **common)
    if options.name == "embedded":
        check(options.asked() | {"no paged forward": type(packed.model).__name__})
    return HFEngine(packed.model, max_batch=sequences, **common)


class ActorWorker(TrainedWorker):
    """Generation and training of a policy on one rank: both on the same live tensors, or, where the placement
    puts them on different devices, one of them.

    `policy_version` counts updates; every sample carries the version that wrote it.
    """

    counter = "policy_version"

    def __init__(
        self,
        model: ModelSource,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...],
        train: EngineOptions,
        rollout: SamplerOptions,
        *,
        head: Head = "lm",
        context: RankContext = ALONE,
    ) -> None:
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.rollout, self.head, self.context = rollout, head, context
        self.policy_version = 0
        live, weights = model_of_rank(model, context)
        trains, generates = ("train" in context.meshes), head == "lm" and "rollout" in context.meshes
        self.train = train if trains else train.generating(context.meshes["rollout"].layout)
        here = context
        if not trains:  # the mesh "rollout" is the one that the engine computes over
            meshes, groups = {"train": context.meshes["rollout"]}, {"train": context.groups.get("rollout")}
            here = context._replace(meshes=meshes, groups=groups)
        apart = WEIGHTS in context.groups and head == "lm"
        # Three ways in which weights reach the rollout engine:
        # - one layout (`_meta_model` is None): it computes with the live training tensors, or is sent them at `sync`;
        # - two layouts (`_meta_model`): each rollout fills a `GenerationModel` from the trained weights and frees it at
        #   its end, so an engine of ours has nothing to be sent at `sync`;
        # - two layouts, and an engine with weights of its own (`_takes_shards`): at `sync` every rank broadcasts its
        #   shards, and each engine keeps those that it computes with; there is no second model here.
        #: The model without weights, where generation has another layout than training.
        self._meta_model: Any = empty_copy(live, "meta") if apart else None
        #: It computes with weights of its own, and takes those of another layout piece by piece.
        self._takes_shards = apart and rollout.name == "vllm" and not has_adapters(live)
        self._packed = PackedModel(live, fused_kernels=train.fused_kernels) if generates and not apart else None
        self.engine = train_engine(live, self.train, head, here, self._packed, weights)
        if self._packed is not None and self._packed.tensor_group is not None:
            self._packed.measure_heads()
        self._rollout_engine: RolloutEngine | None = None
        self._start_engine: RolloutEngine | None = None
        #: Of an engine that can score what it has sampled.
        self._sync: SyncCheck | None = None

    @contextmanager
    def _weights(self, *, overlap: bool = False) -> Iterator[TrainEngine]:
        """Inside, the weights for generation are in memory: the trained ones or, if generation has another layout, a
        copy in that layout. All ranks of the role must then enter together."""
        if self._meta_model is None or self._takes_shards:
            yield self.engine
            return
        with self._generation_model.filled(overlap=overlap) as engine:
            yield engine

    @cached_property
    def _generation_model(self) -> GenerationModel:
        return GenerationModel(self._meta_model, self.train, self.context, self.engine)

    @property
    def rollout_engine(self) -> RolloutEngine:
        """The rollout engine, made at first use on all ranks that generate."""
        if self._rollout_engine is None:
            # In this order: the weights are there, the engine is made around them, and it is given them under their
            # version, all before the first request.
            with self._weights() as weights:
                if self._takes_shards:
                    packed = PackedModel(self._meta_model, device=self.context.device or "cpu")
                else:
                    packed = self._packed or self._generation_model.packed
                self._rollout_engine = make_rollout_engine(packed, self.tokenizer, self.eos_token_ids, self.rollout)
                self._rollout_engine.load_shards(self._served(weights), self.policy_version)
            if hasattr(self._rollout_engine, "score"):
                self._sync = SyncCheck()
        return self._rollout_engine

    @dispatch("rollout")
    def exact_rollout(self) -> bool:
        """Whether the rollout engine's log-probs are the trainer's own numbers (`RolloutEngine.exact`)."""
        # Weights in another layout are the same bit for bit, unless a layer of a bf16 model is kept in fp32.
        is_same = self._meta_model is None or len({spec.dtype for spec in self.engine.weights.specs.values()}) == 1
        return is_same and bool(getattr(self.rollout_engine, "exact", False))

    @dispatch("rollout")
    def keep_start(self, engine: RolloutEngine) -> None:
        """Set the engine with the initial weights, which episodes may query."""
        self._start_engine = engine

    @dispatch("rollout", split="rows", collect="batches")
    def generate(self, prompts: Batch, params: SamplingParams, task: str | None = None) -> Iterator[Batch]:
        """Samples as groups finish. Rows carry `id`, `group` and `prompt_tokens`; a row whose column
        `baseline` is true is decoded greedily. `task` may have an episode of its own. Yields the rows with the response
        columns added; under an episode one row a trajectory, with more columns: see `episode_rows`."""
        engine = self.rollout_engine
        with self._weights(overlap=self.rollout.overlap_comm) as weights:
            try:
                engine.wake()
                self._refill(weights)
                if self._sync is not None:
                    self._sync.probe = None
                if isinstance(engine, EmbeddedEngine) and not engine.runner.is_driver:
                    engine.runner.worker_loop()
                else:
                    yield from self._groups(engine, prompts, params, task, weights.precision)
            finally:
                engine.sleep()

    def _groups(
        self, engine: RolloutEngine, prompts: Batch, params: SamplingParams, task: str | None, precision: torch.dtype
    ) -> Iterator[Batch]:
        """The rows of `generate`, on a rank that has requests."""
        episode = load_episode(self.rollout.episodes.get(task or "", self.rollout.episode))
        greedy = replace(params, temperature=0.0)
        baseline = prompts["baseline"] if "baseline" in prompts else [False] * len(prompts)
        rows = [greedy if is_baseline else params for is_baseline in baseline]
        is_double, version = precision == torch.float64, engine.policy_version
        ended: Any
        if episode is None:
            requests = starmap(Request, zip(prompts["id"], prompts["prompt_tokens"], rows, strict=True))
            ended, row_of = generate(engine, requests), {id_: row for row, id_ in enumerate(prompts["id"])}
        else:
            if (check_values := getattr(episode, "check_values", None)) is not None:
                check_values("the prompts", prompts)
            options: Any = {"tokenizer": self.tokenizer, "ends": self.eos_token_ids, "start": self._start_engine}
            ended = outcomes(engine, list(prompts.rows()), rows, episode, **options)
        group_of = {row: group for group in prompts.group_indices() for row in group}
        done: dict[int, Any] = {}
        with closing(ended):  # cancels unfinished requests before the engine is used again
            for last in ended:
                row = row_of[last.id] if episode is None else last.index
                done[row], group = last, group_of[row]
                if not all(row in done for row in group):
                    continue
                results, inputs = [done.pop(row) for row in group], prompts.take(group)
                if episode is None:
                    finished = inputs.add(response_columns([Turns().wrote(sample) for sample in results], is_double))
                else:
                    for error in filter(None, (outcome.error for outcome in results)):
                        logger.warning("%s", error)
                    finished = episode_rows(inputs, results, version, is_double)
                if self._sync is not None:
                    self._sync.probe = self._sync.probe or finished.slice(0, ROWS)
                yield finished

    @dispatch("train", split="rows", collect="rows")
    def log_probs(self, batch: Batch, temperature: float = 1.0, adapters: bool = True) -> Batch:
        """Column `log_probs`, aligned with `response_tokens`; without the model's `adapters` it is `ref_log_probs`."""
        flat = self.engine.predict(batch, ("log_probs",), temperature=temperature, adapters=adapters)["log_probs"]
        column = "log_probs" if adapters else "ref_log_probs"
        return Batch.from_columns({column: (flat, batch.lengths("response_tokens"))})

    @dispatch("train", split="rows", collect="rows")
    def scores(self, batch: Batch) -> Batch:
        """Column `scores`, one number a row; for a score head."""
        return Batch.from_columns(self.engine.predict(batch, ("scores",)))

    @dispatch("train")
    def loss(self, part: TaskLoss, skip_zero_advantage_rows: bool = False) -> dict[str, float]:
        """`loss` and metrics of an update, without the update."""
        return self.engine.loss([loss_term(self.engine, part, skip_zero_advantage_rows)])

    @dispatch("train")
    def update(self, parts: Sequence[TaskLoss], plan: MiniBatchPlan) -> dict[str, float]:
        """Optimizer steps. Generation gets the new weights at `sync`."""
        if self.policy_version == 0 and self._sync is not None:
            with self._weights() as weights:
                self._refill(weights)
                self._measure(weights)  # the baseline of later measurements
                self.rollout_engine.sleep()
        return run_updates(self.engine, parts, plan, self.policy_version)

    @dispatch()
    def sync(self) -> dict[str, float]:
        """After an update: sync the weights to every rank that generates, under the next policy version."""
        self.policy_version += 1
        if self.context.is_apart:
            trained = Stream(self.engine.shards) if "train" in self.context.meshes else None
            spread(trained, self.context, self.engine.load_shards)
        return self._sync_weights()

    @dispatch("rollout", collect="shards")
    def merged_shards(self) -> Iterator[Shard]:
        """The whole weights, with adapters merged into them."""
        if self._meta_model is None:
            yield from self.engine.merged_shards()
            return
        whole = self._generation_model
        if whole.packed.tensor_group is not None:  # adapters are merged into whole weights
            whole = GenerationModel(self._meta_model, self.train, self.context, self.engine, whole=True)
        with whole.filled() as engine:
            yield from engine.merged_shards()

    def _sync_weights(self) -> dict[str, float]:
        """Load the weights into the rollout engine under their version; returns the metrics of `SyncCheck`."""
        engine = self._rollout_engine
        if engine is None:
            return {}
        if self._meta_model is not None and getattr(engine, "is_live", False):
            engine.load_shards((), self.policy_version)  # they read the model in a rollout
            return {}
        with self._weights() as weights:
            engine.load_shards(self._served(weights), self.policy_version)
            return self._measure(weights)

    def _refill(self, weights: TrainEngine) -> None:
        """Send the weights again if the engine dropped them while it slept."""
        engine = self.rollout_engine
        dropped = getattr(engine, "lacks_weights", False)
        if self._takes_shards:  # all ranks send together
            dropped = any(gather_json(dropped, self.context.groups[ROLE]))
        if dropped:
            engine.load_shards(self._served(weights), self.policy_version)

    def _served(self, weights: TrainEngine) -> Iterator[Shard]:
        """The shards to load into the engine: its own live tensors, or the shards of every rank (`_takes_shards`), or
        else whole weights, adapters merged."""
        if self._takes_shards:
            return broadcast_shards(Stream(weights.shards), self.context.groups[ROLE])
        return weights.shards() if getattr(self._rollout_engine, "is_live", False) else weights.merged_shards()

    def _measure(self, weights: TrainEngine) -> dict[str, float]:
        if self._sync is None:
            return {}
        if self._takes_shards:  # ranks that share the trained model predict the same samples
            probe = self._sync.probe
            columns = probe and {name: list(probe[name]) for name in ("prompt_tokens", "response_tokens")}
            probed = next(filter(None, gather_json(columns, self.context.groups[ROLE])), None)
            self._sync.probe = probed and Batch.from_columns(probed)
        return self._sync.measure(self._rollout_engine, weights)


class ReferenceWorker:
    """The frozen policy that KL is measured against: a copy of the weights as they were when it was made."""

    def __init__(self, model: ModelSource, train: EngineOptions, *, context: RankContext = ALONE) -> None:
        live, weights = model_of_rank(model, context)
        self.engine = train_engine(live.requires_grad_(False), train.frozen(), "lm", context, weights=weights)

    @dispatch("train", split="rows", collect="rows")
    def log_probs(self, batch: Batch, temperature: float = 1.0) -> Batch:
        """Column `ref_log_probs`, aligned with `response_tokens`."""
        flat = self.engine.predict(batch, ("log_probs",), temperature=temperature)["log_probs"]
        return Batch.from_columns({"ref_log_probs": (flat, batch.lengths("response_tokens"))})


def engine_factory(name: str | EngineFactory) -> EngineFactory | None:
    """A factory of the user's, or the one in that file; None: the name is an engine of ours.

    Raises:
        ConfigError: the name is unknown, or the file has no such factory.
    """
    if not isinstance(name, str):
        return name
    if ".py:" in name:
        return load_function(name)
    check_known("no rollout engine is called", [name], ENGINES, hint="; or give FILE.py:CLASS")
    return None


def load_episode(episode: Episode | str | None) -> Episode | None:
    """Load an episode from its file if need be; a factory of environments becomes the episode that plays them.

    Raises:
        ConfigError: it cannot be called.
    """
    if episode is None:
        return None
    played: Episode = as_episode(load_function(episode) if isinstance(episode, str) else episode)
    if not callable(played):
        raise ConfigError(f"episode: must be a function `async episode(client, row)`, not {shown(played)}")
    return played
