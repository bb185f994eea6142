"""A rollout worker in a process of its own: it samples while others train, and takes new weights between two tokens."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from verl.batch import Batch
from verl.rollout.base import Request, RolloutEngine, Sample, as_sampling
from verl.rollout.options import SamplerOptions
from verl.rollout.turns import Turns, response_columns
from verl.workers.pooled import PooledWorker

if TYPE_CHECKING:
    from verl.roles.actor import Actor

#: Seconds for a part of the weights to come from the object store.
_PART_DEADLINE = 120


@dataclass(frozen=True)
class EngineRecipe:
    """Makes an actor's engine in another process; the weights come later.

    Attributes:
        config: the model's configuration, as plain values: the live one says which attention has been set there.
        dtype: of its weights, by name.
        device: their kind of device: a worker's process has one of its own, whatever number the actor's has.
    """

    config: Mapping[str, Any]
    dtype: str
    device: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    fused_kernels: bool
    options: SamplerOptions

    @classmethod
    def of(cls, actor: Actor) -> EngineRecipe:
        actor.resolve_engine()
        return cls(
            config=actor.model.config.to_dict(),
            dtype=str(actor.model.dtype).removeprefix("torch."),
            device=actor.device.partition(":")[0],
            tokenizer=actor.tokenizer,
            eos_token_ids=actor.ends,
            fused_kernels=bool(actor.train_options.fused_kernels),
            options=actor.rollout_options,
        )

    def make(self) -> RolloutEngine:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from verl.models.packed import PackedModel
        from verl.workers.actor import make_rollout_engine

        config, dtype = AutoConfig.for_model(**self.config), getattr(torch, self.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(self.device)
        packed = PackedModel(model, fused_kernels=self.fused_kernels)
        return make_rollout_engine(packed, self.tokenizer, self.eos_token_ids, self.options)


@dataclass(frozen=True)
class Weights:
    """A policy's weights as a stream of named shards that every process of the cluster can pull.

    Attributes:
        version: of the policy.
        parts: references to lists of shards in Ray's object store.
    """

    version: int
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Finished:
    """A sampled group, and the intervals in which its worker was busy since the previous one."""

    group: str
    samples: Batch
    worker: int
    busy: list[tuple[float, float]]


class StandaloneWorker(PooledWorker):
    """An engine and the groups that it samples. Commands wait in an inbox, which is read between two tokens."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Weights | tuple[str, Batch, Mapping[str, Any]]] = queue.SimpleQueue()
        self._groups: dict[str, tuple[Batch, dict[str, Sample]]] = {}
        self._of: dict[str, str] = {}
        self._busy: list[tuple[float, float]] = []
        self._is_double = False

    def post(self, order: Weights | tuple[str, Batch, Mapping[str, Any]]) -> None:
        """New weights; or a group to sample: its name, its rows and the sampling parameters."""
        self.inbox.put(order)

    def run(self, recipe: EngineRecipe, index: int, finished: Any = None) -> Iterator[Finished | None]:
        """Make the engine, yield None, and sample without end.

        Args:
            recipe: of the engine.
            index: this worker's.
            finished: a `ray.util.queue.Queue` that the groups go into; None: they are yielded.
        """
        engine = recipe.make()
        self._is_double = recipe.dtype == "float64"
        yield None
        while True:
            try:
                self._take(engine, self.inbox.get(block=not engine.unfinished))
            except queue.Empty:
                for done in self._step(engine, index):
                    if finished is None:
                        yield done
                    else:
                        finished.put(done)

    def _take(self, engine: RolloutEngine, order: Weights | tuple[str, Batch, Mapping[str, Any]]) -> None:
        if isinstance(order, Weights):
            import ray

            parts = (ray.get(part, timeout=_PART_DEADLINE) for part in order.parts)
            engine.load_shards(chain.from_iterable(parts), order.version)
            return
        group, rows, settings = order
        engine.wake()
        params = as_sampling(settings)
        greedy = replace(params, temperature=0.0)
        baseline = rows["baseline"] if "baseline" in rows else [False] * len(rows)
        self._groups[group] = (rows, {})
        for id_, tokens, is_greedy in zip(rows["id"], rows["prompt_tokens"], baseline, strict=True):
            self._of[id_] = group
            engine.add(Request(id_, tokens, greedy if is_greedy else params))

    def _step(self, engine: RolloutEngine, index: int) -> Iterator[Finished]:
        start = time.time()
        ended = engine.step()
        if self._busy and start - self._busy[-1][1] < 1e-3:
            start, _ = self._busy.pop()
        self._busy.append((start, time.time()))
        for sample in ended:
            group = self._of.pop(sample.id)
            rows, samples = self._groups[group]
            samples[sample.id] = sample
            if len(samples) == len(rows):
                del self._groups[group]
                done = rows.add(response_columns([Turns().wrote(samples[id_]) for id_ in rows["id"]], self._is_double))
                spans, self._busy = self._busy, []
                yield Finished(group, done, index, spans)
