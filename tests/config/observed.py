"""What settings do, seen from outside: samples, losses and gradients; calls of functions; files; how it ended."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pyarrow.parquet as pq
import torch

from tests import ranks
from tests.config import inputs
from verl.algorithms import make_algorithm
from verl.algorithms.loss_terms import LossNeeds, LossTerm
from verl.batch import Batch
from verl.checkpoint.store import load_checkpoint
from verl.config import Config, build_config, to_yaml
from verl.dataflow import loop
from verl.errors import VerlError
from verl.models.loading import load_model, load_tokenizer
from verl.models.packed import PackedModel
from verl.models.portable import PortableModel
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.options import SamplerOptions
from verl.run.build import build_actor, build_critic, check_settings, sources_of
from verl.run.data import build_data
from verl.run.train import train
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.workers.actor import ActorWorker

SCRIPT = Path(__file__).with_name("rank_observed.py")
#: End-of-sequence tokens of the models of these tests.
ENDS = (0,)
#: In names of metrics and files, what a clock or the machine decides.
TIMED = ("time/", "busy/", "_per_s", "memory/", "seconds")


@dataclass
class Seen:
    """`numbers`: samples, data in their order, losses, gradients, weights. `calls` of Python functions, by the last two
    parts of the file and the name, and "threads" of torch. `files`: what they hold. `ended`: how."""

    numbers: Any = None
    calls: Counter[str] = field(default_factory=Counter)
    files: dict[str, Any] = field(default_factory=dict)
    ended: Any = None


#: What settings do (those of a file, or a record of Python's) to the input of a number, see `tests.config.inputs`.
Observer = Callable[[Any, int], Seen]


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with dotted keys changed; `*` is the first item of a list or a mapping."""
    settings = copy.deepcopy(dict(settings))
    for key, value in changes.items():
        node: Any = settings
        *above, last = key.split(".")
        for name in above:
            if name == "*":
                node = node[0] if isinstance(node, list) else next(iter(node.values()))
            else:
                node[name] = node.get(name) if node.get(name) is not None else {}
                node = node[name]
        node[last] = copy.deepcopy(value)
    return settings


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of every Python function, on all threads of this process."""
    calls: dict[int, int] = {}
    codes: dict[int, CodeType] = {}  # by identity: a code object's hash is of all of its text
    named: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            key = id(frame.f_code)
            if key not in codes:
                codes[key] = frame.f_code
            calls[key] = calls.get(key, 0) + 1

    threading.setprofile(count)
    sys.setprofile(count)
    # The compute thread may be there since an earlier observer, whose calls it would go on to count.
    loop.submit(sys.setprofile, count).result.result()
    try:
        yield named
    finally:
        loop.submit(sys.setprofile, None).result.result()
        sys.setprofile(None)
        threading.setprofile(None)
        for key, code in dict(codes).items():  # a copy: threads may still count
            if code.co_name != "<module>":
                named["/".join(Path(code.co_filename).parts[-2:]) + ":" + code.co_name] += calls.get(key, 0)


def checked(settings: Mapping[str, Any]) -> Config:
    """The settings of a run as a command takes them."""
    config = build_config(settings)
    check_settings(config)
    return config


def observe(observer: Observer, make: Callable[[], Any], number: int, folder: Path) -> Seen:
    """What an observer sees in an empty folder of the settings that `make` makes; an error of ours is an end like any
    other."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    threads = torch.get_num_threads()
    seen = Seen()
    try:
        with counted() as calls:
            seen = observer(make(), number)
    except VerlError as error:
        seen.ended = f"{type(error).__name__}: {error}"
    finally:
        calls["threads"] = torch.get_num_threads()
        torch.set_num_threads(threads)
        os.chdir(before)
    seen.calls = seen.calls or calls
    seen.files = dict(files(folder))
    return seen


def files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Files by name and what tables and lines of them hold, without what depends on the clock or on the settings."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"-[0-9a-f]{8}(?=[/.])", "", path.relative_to(folder).as_posix())
        name = re.sub(r"tfevents.*", "tfevents", name)
        content: Any = None
        if path.suffix == ".jsonl":
            content = [untimed(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".parquet":
            content = pq.read_table(path).to_pylist()
        if not path.parts[-2].startswith(("logs", "latest")):
            yield name, content


def untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(part in name for part in TIMED)}


def distance(a: Any, b: Any) -> float:
    """The largest between the numbers of two structures; infinite if they are not alike."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return max((distance(a[key], b[key]) for key in a), default=0.0) if a.keys() == b.keys() else math.inf
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return max(map(distance, a, b), default=0.0) if len(a) == len(b) else math.inf
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return float((a.double() - b.double()).abs().max()) if a.shape == b.shape and a.numel() else math.inf
    if isinstance(a, float | int) and isinstance(b, float | int):
        return 0.0 if a == b or (a != a and b != b) else abs(a - b)
    return 0.0 if a == b else math.inf


def rows_of(config: Config) -> int:
    return config.data.batch_size * config.actor_rollout_ref.rollout.n


def samples(config: Config, number: int) -> Seen:
    """Two batches of samples of the actor."""
    actor, prompts = build_actor(config, "lm", rows_of(config)), inputs.texts(number)
    batches = [
        actor.generate_sequences(prompts, n=config.actor_rollout_ref.rollout.n, key=f"{number}/{i}") for i in range(2)
    ]
    return Seen([written(batch) for batch in batches])


def written(batch: Batch) -> list[Any]:
    return [list(batch[name]) for name in ("prompt_tokens", "response_tokens", "rollout_log_probs")]


def updates(config: Config, number: int) -> Seen:
    """Losses and gradient norms of three updates on the same samples, and the weights after them."""
    algorithm = make_algorithm(config.algorithm.name, **config.algorithm.options)
    batch = inputs.scored(number)
    actor = build_actor(config, "lm", len(batch))
    roles: dict[str, Any] = {"actor": actor}
    if "critic" in algorithm.roles:
        roles["critic"] = build_critic(config, len(batch))
    updater = Updater(algorithm, **roles)
    metrics = [updater.update(batch) for _ in range(3)]
    weights = {f"{role}/{s.name}": s.tensor.detach().clone() for role, of in roles.items() for s in of.shards()}
    return Seen({"metrics": [learned(of) for of in metrics], "weights": weights})


def engine_updates(path: str) -> Observer:
    """The same of a training engine alone; one that only reads says what it predicts."""

    def observe_engine(options: EngineOptions, number: int) -> Seen:
        engine, algorithm = TorchEngine(load_model(path), options), make_algorithm("grpo")
        batch, _ = algorithm.prepare(inputs.scored(number))
        if not options.trains:
            return Seen(engine.predict(batch, ("log_probs",)))
        needs = LossNeeds(columns=algorithm.loss_columns)
        part = LossTerm(batch, algorithm.compute_loss, algorithm.token_weights(batch), needs)
        metrics = [engine.update([part]) for _ in range(3)]
        weights = {shard.name: shard.tensor.detach().clone() for shard in engine.shards()}
        return Seen({"metrics": [learned(of) for of in metrics], "weights": weights})

    return observe_engine


def worker_samples(options: SamplerOptions, number: int) -> Seen:
    """Samples of the task "a" that a worker draws by its options."""
    model, tokenizer = load_model("../tiny"), load_tokenizer("../tiny")
    worker = ActorWorker(PortableModel(model), tokenizer, ENDS, EngineOptions(), options)
    prompts = inputs.token_prompts(number)
    names = [f"{number}/{row}" for row in range(len(prompts))]
    rows = Batch.from_columns({"id": names, "group": names, "prompt_tokens": prompts})
    batch = Batch.concat([*worker.generate(rows, SamplingParams(max_new_tokens=9), "a")])
    row_of = {name: row for row, name in enumerate(batch["id"])}
    return Seen(written(batch.take([row_of[name] for name in names])))


def engine_samples(params: SamplingParams, number: int) -> Seen:
    """Samples that an engine draws by these parameters."""
    packed, tokenizer = PackedModel(load_model("../tiny")), load_tokenizer("../tiny")
    engine = EmbeddedEngine(packed, eos_token_ids=ENDS, seed=0, tokenizer=tokenizer)
    prompts = inputs.token_prompts(number)
    drawn = generate(engine, [Request(f"{number}/{row}", tokens, params) for row, tokens in enumerate(prompts)])
    return Seen({sample.id: [sample.tokens, sample.log_probs] for sample in drawn})


@functools.cache
def two_ranks(observer: Observer) -> Observer:
    """The same on two ranks, which share the models: what rank 0 sees."""

    def observe_there(config: Config, number: int) -> Seen:
        Path("settings.yaml").write_text(to_yaml(config))
        ranks.job(2, SCRIPT, observer.__name__, "settings.yaml", str(number), "seen.pt")
        there = torch.load("seen.pt", weights_only=True)
        return Seen(there["numbers"], Counter(there["calls"]), ended=there["ended"])

    return observe_there


def learned(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith(("loss", "grad_norm"))}


def data(config: Config, number: int) -> Seen:
    """The first batches of training; the rows are those of the files that the settings name."""
    checked = check_settings(config)
    actor = build_actor(config, checked.tasks[0].algorithm.head, checked.rows)
    train, *_ = build_data(config, actor, checked.data)
    batches = [batch.drop([n for n in batch.columns if n not in ("id", "prompt_tokens", "response_tokens")])
               for batch in itertools.islice(train, 6)]  # fmt: skip
    return Seen([[*batch.rows()] for batch in batches])


def rewards(config: Config, number: int) -> Seen:
    """Scores of some responses; the end is how many have none."""
    return _scores(sources_of(config)["reward"], number)


def costs(config: Config, number: int) -> Seen:
    """The same of a cost."""
    return _scores(sources_of(config)["cost"], number)


def _scores(source: Reward, number: int) -> Seen:
    try:
        scores = list(source.get_reward(Batch.from_rows(inputs.answered(number)))["reward"])
    finally:
        source.close()
    return Seen(scores, ended=scores.count(None))


def run(config: Config, number: int) -> Seen:
    """A whole run, of the files that the settings name: samples and numbers of each step, the weights at the end, and
    at what step that was."""
    train(config)
    (folder,) = Path(config.trainer.output_dir).glob("latest")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tables = [pq.read_table(path) for path in sorted((folder / "completions").glob("train-*.parquet"))]
    columns = [[*map(list, table.select([c for c in ("id", "prompt", "response") if c in table.column_names])
                     .to_pydict().values())] for table in tables]  # fmt: skip
    weights = load_checkpoint(folder / "checkpoints" / "latest").tensors("actor/weights")
    steps = [learned(line) for line in lines if "loss/actor" in line]
    ended = {"steps": len(steps), "resamples": sum(line.get("rollout/resamples", 0) for line in lines)}
    return Seen({"samples": columns, "steps": steps, "weights": {**weights}}, ended=ended)


def again(config: Config, number: int) -> Seen:
    """A run of which all but the last step was there before."""
    train(config.replace(trainer=config.trainer.replace(total_steps=config.trainer.total_steps - 1)))
    return run(config, number)
