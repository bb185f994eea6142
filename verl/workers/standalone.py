"""A rollout worker in a process of its own: it samples while others train, and takes new weights between two tokens.

It is sent "model" (first: architecture, tokenizer, engine), "weights" and "rollout" (the rows of one group), and
sends "group" (its finished rows).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save

from verl.batch import Batch
from verl.rollout.base import Request, RolloutEngine, as_sampling
from verl.rollout.episode import Turns, response_columns
from verl.shard import Shard
from verl.workers.channel import Message

if TYPE_CHECKING:
    from verl.roles.actor import Actor


class StandaloneWorker:
    """An engine, the groups it samples, and the messages about them."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send = send
        self.engine: RolloutEngine | None = None
        self._groups: dict[str, tuple[Batch, dict[str, Turns]]] = {}
        self._of: dict[str, str] = {}
        self._busy: list[tuple[float, float]] = []

    @property
    def is_busy(self) -> bool:
        return self.engine is not None and self.engine.unfinished > 0

    def on_model(self, message: Message) -> None:
        self.engine = _engine(message)

    def on_weights(self, message: Message) -> None:
        assert self.engine is not None
        tensors = load(bytes(message.data))
        self.engine.load_shards((Shard.whole(name, t) for name, t in tensors.items()), message.head["version"])

    def on_rollout(self, message: Message) -> None:
        assert self.engine is not None
        rows = Batch.from_ipc(message.data)
        self.engine.wake()
        params = as_sampling(message.head["params"])
        greedy = replace(params, temperature=0.0)
        baseline = rows["baseline"] if "baseline" in rows else [False] * len(rows)
        self._groups[message.head["group"]] = (rows, {})
        for id_, tokens, is_greedy in zip(rows["id"], rows["prompt_tokens"], baseline, strict=True):
            self._of[id_] = message.head["group"]
            self.engine.add(Request(id_, tokens, greedy if is_greedy else params))

    def step(self) -> None:
        assert self.engine is not None
        began = time.time()
        samples = self.engine.step()
        self._note(began, time.time())
        for sample in samples:
            group = self._of.pop(sample.id)
            rows, turns = self._groups[group]
            turns[sample.id] = Turns().wrote(sample)
            if len(turns) == len(rows):
                del self._groups[group]
                done = rows.add(response_columns([turns[id_] for id_ in rows["id"]]))
                spans, self._busy = self._busy, []
                self.send("group", done.to_ipc(), group=group, busy=spans)

    def _note(self, start: float, end: float) -> None:
        if self._busy and start - self._busy[-1][1] < 1e-3:
            start, _ = self._busy.pop()
        self._busy.append((start, end))


def describe(actor: Actor) -> tuple[dict[str, Any], bytes]:
    """What a worker must be told to make the actor's engine: a JSON head, and the tokenizer's files."""
    from verl.models.loading import eos_token_ids

    options = actor.rollout_options
    head = {
        "config": actor.model.config.to_dict(),
        "device": str(actor.model.device),
        "dtype": str(actor.model.dtype).removeprefix("torch."),
        "eos": list(eos_token_ids(actor.model, actor.tokenizer)),
        "fused_kernels": bool(actor.train_options.fused_kernels),
        "rollout": {name: getattr(options, name) for name in options.__dataclass_fields__ if name != "episode"},
    }
    files = Batch.from_rows(list(_files(actor.tokenizer)))
    return head, files.to_ipc()


def weights(shards: Iterator[Shard]) -> bytes:
    """A stream of whole weights, as one message."""
    return save({shard.name: shard.tensor.contiguous() for shard in shards})


def _files(tokenizer: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        # Several chat templates are files in a folder of their own.
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            yield {"name": file.relative_to(folder).as_posix(), "data": file.read_bytes()}


def _engine(message: Message) -> RolloutEngine:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.data.files import inside
    from verl.models.loading import load_tokenizer
    from verl.models.packed import PackedModel
    from verl.workers.actor import RolloutOptions, make_rollout_engine

    head = message.head
    with tempfile.TemporaryDirectory() as folder:
        for row in Batch.from_ipc(message.data).rows():
            file = inside(Path(folder), row["name"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(row["data"])
        tokenizer = load_tokenizer(folder)
    config = AutoConfig.for_model(**head["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, head["dtype"])).eval().to(head["device"])
    packed = PackedModel(model, fused_kernels=head["fused_kernels"])
    return make_rollout_engine(packed, tokenizer, tuple(head["eos"]), RolloutOptions(**head["rollout"]))
