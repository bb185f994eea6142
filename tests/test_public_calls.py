"""Whatever a public constructor or call is given: an error of this package, a TypeError about a missing or unknown
argument, or something that then takes a step with finite numbers or fails in it by an error that names the argument;
within seconds and bounded memory. Calls are made from signatures, each in a process of its own."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import pkgutil
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import verl
from tests import forked
from tests.algorithms import test_options
from tests.algorithms.support import OFFLINE, ONLINE
from tests.conftest import Plain, byte_tokenizer, config_of, save_tiny
from verl._host.ray_session import connect, remove_sessions
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.data.prompts import load_prompts
from verl.data.task_loader import get_dataloader
from verl.errors import ConfigError, VerlError, shown
from verl.rewards.make import make_reward
from verl.rewards.source import run_reward, source_of
from verl.roles.columns import as_responses
from verl.rollout.guards import GuardModel
from verl.rollout.tools import ToolEpisode, tool
from verl.trainer.evaluation import HeldOut, binomial_interval, paired_bootstrap
from verl.trainer.guard import SafetyGuard
from verl.trainer.options import OTHERS, RECORDS
from verl.trainer.task_weights import DynamicTaskWeightScheduler
from verl.utils.batching import DynamicBatchSampler


class Mute:
    """An object that has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


ODD: tuple[Any, ...] = (
    "x", "", "1", b"x", 0, 1, -1, -2, 2, 2**31, 2**63, 10**400, 0.0, 0.5, 1.5, -0.5, -1.0, 1e308, math.nan, math.inf,
    -math.inf, True, False, None, [], [None], ["a"], [1, 2], (), (1.0,), {}, {"a": 1}, {1: 2}, {"a": math.nan},
    object(), Mute(),
    Path("some/where"), torch.zeros(2), range(3), complex(1, 1),
)  # fmt: skip
#: What a call may take, with one step of what it makes.
SECONDS, BYTES = 5.0, 1 << 30
#: What a step may take whose worker processes start with it: Ray's, and the imports of each.
SECONDS_OF_PROCESSES = 120.0
#: Options of every reward.
ON_FAILURE = ("timeout", "retries", "default_reward", "max_failure_rate", "smoothing", "name")
#: Arguments that no call is tried with: they start processes or listen.
LEFT_OUT = {"placement", "device_map", "num_rollout_workers", "num_update_workers", "workers"}


@dataclass
class Target:
    """A call with arguments that work, and what is then done with its result, whose numbers are given back."""

    call: Callable[..., Any]
    good: dict[str, Any]
    use: Callable[[Any], Any] = lambda made: None
    #: Of another call, to which `**options` go.
    further: tuple[str, ...] = ()
    #: Around all calls in their process.
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: What `use` may take beyond the call's own time.
    further_seconds: float = 0.0
    #: Of its calls, how many are tried when all of the others are.
    share: float = 1.0

    @property
    def names(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        own = [p.name for p in inspect.signature(self.call).parameters.values() if p.kind not in kinds]
        return [name for name in (*own, *self.further) if name not in LEFT_OUT | {"self"}]


@cache
def model(folder: Path) -> verl.Actor:
    return verl.Actor(str(save_tiny(folder / "fuzzed")), sampling={"max_new_tokens": 3})


def letters(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def codes(texts: list[str]) -> list[float]:
    """Of different texts hardly ever the same: something is to be learned."""
    return [float(sum(map(ord, text))) for text in texts]


def step(trainer: Any) -> Any:
    return trainer.step(["ab", "cd"])


def asynchronous_step(trainer: verl.AsyncTrainer) -> Any:
    try:
        return trainer.advance(iter([["ab", "cd"]]))
    finally:
        trainer.close()


def interleaved_step(trainer: verl.InterleavedTrainer) -> Any:
    return trainer.fit(get_dataloader([{"prompt": "ab", "task": name} for name in trainer.tasks], batch_size=2), 1)


@contextmanager
def cluster() -> Iterator[None]:
    """Of Ray, started before the memory of calls is bounded, and ended with their process."""
    ray = connect()
    try:
        yield
    finally:
        ray.shutdown()
        remove_sessions()


def trained(actor: verl.Actor) -> Any:
    return step(verl.Trainer(actor, reward_fn=letters, log_dir=False, n=2, sampling={"max_new_tokens": 3}))


def sampled(actor: verl.Actor, **sampling: Any) -> Any:
    return actor.generate_sequences(["ab"], n=2, **sampling).tensor("rollout_log_probs").tolist()


def scored(reward: Any) -> Any:
    return run_reward(source_of(reward), as_responses(["ab", "c"])).as_batch()["reward"]


def served(reward: Any) -> Any:
    """Scores of a server that answers: none may be missing."""
    scores = run_reward(source_of(reward), as_responses(["ab", "c"])).as_batch()
    return [math.nan if score is None else score for score in scores["reward"]] or scores["abstain_reason"]


def ran(actor: verl.Actor, *stages: Any) -> Any:
    pipeline = verl.RLDataPipeline()
    for number, stage in enumerate(stages or [actor]):
        pipeline.add_stage(f"stage {number}", stage)
    return list(pipeline.run(["ab"]).metrics.values())


def ran_once(pipeline: verl.RLDataPipeline) -> Any:
    try:
        return pipeline.run(["ab"])
    finally:
        pipeline.stages.clear()  # those of the next call


def targets(folder: Path, server: str) -> Iterator[Target]:
    """All calls.

    Args:
        folder: where models lie.
        server: the address of a server that judges and scores.
    """
    actor = model(folder)
    path = str(folder / "fuzzed")
    samples = actor.generate_sequences(["ab"], n=2, max_new_tokens=3)
    yield from models(actor, path, samples)
    yield from rewards()
    yield from served_rewards(server)
    yield from trainers(actor)
    yield from data(actor, samples)
    yield Target(SafetyGuard, {"monitor_metrics": ["reward"]}, lambda guard: guard.observe({"reward": 0.5, "step": 1}))
    weights = {"initial_weights": {"a": 1.0, "b": 2.0}}
    yield Target(DynamicTaskWeightScheduler, weights, lambda tasks: tasks.update(1, {"a": {"reward/mean": 1.0}}))
    yield Target(binomial_interval, {"successes": 1, "total": 2}, lambda share: [share.low, share.high])
    yield Target(paired_bootstrap, {"before": [0.0, 1.0], "after": [1.0, 1.0]}, lambda gain: [gain.low, gain.high])
    yield Target(ToolEpisode, {"tools": [count]})
    yield Target(tool, {"function": count})
    yield Target(verl.Gateway, {"agent": count})
    yield Target(verl.EnvironmentEpisode, {"tools": [count]})
    yield Target(GuardModel, {"model_name": path}, lambda guard: guard.judge("a", "b"))
    for name in (*ONLINE, *OFFLINE):
        further = tuple(field for field in vars(make_algorithm(name)) if not field.startswith("_"))
        yield Target(
            lambda _name=name, **options: make_algorithm(_name, **options),
            {},
            partial(test_options.answers, name),
            further,
        )


def models(actor: verl.Actor, path: str, samples: Batch) -> Iterator[Target]:
    options = ("lr", "max_new_tokens", "top_p", "micro_batch_size", "use_amp", "dtype", "epochs", "kv_cache_gb")
    yield Target(verl.Actor, {"model": path, "sampling": {"max_new_tokens": 3}}, trained, options)
    values = lambda critic: critic.compute_values(samples).tensor("values").tolist()  # noqa: E731
    yield Target(verl.Critic, {"model": path}, values, ("lr", "micro_batch_size", "epochs", "dtype"))
    update = lambda updater: [*updater.update(samples, [0.0, 1.0]).values()]  # noqa: E731
    further = ("clip_ratio", "kl_in", "norm_adv_by_std")
    yield Target(verl.Updater, {"algorithm": "grpo", "actor": actor}, update, further)
    yield Target(verl.SamplingParams, {"max_new_tokens": 3}, lambda params: sampled(actor, **asdict(params)))
    sampling = ("max_new_tokens", "temperature", "top_k", "stop")
    yield Target(actor.generate_sequences, {"prompts": ["ab"], "max_new_tokens": 3}, further=sampling)
    yield Target(actor.update, {"sequences": samples, "rewards": [0.0, 1.0]}, lambda metrics: [*metrics.values()])
    yield Target(actor.compute_log_probs, {"sequences": samples})
    yield Target(actor.make_reference, {}, lambda _: actor.compute_ref_log_probs(samples)["ref_log_probs"])
    critic = verl.Critic(path)
    yield Target(critic.compute_values, {"sequences": samples})
    yield Target(critic.update, {"sequences": samples, "rewards": [0.0, 1.0]}, lambda metrics: [*metrics.values()])


def rewards() -> Iterator[Target]:
    further = ("timeout", "retries", "default_reward", "max_failure_rate", "smoothing", "batch_size")
    further = (*further, "whole_batch", "name")
    yield Target(verl.Reward, {"reward_fn": letters}, scored, further)
    several = {"source": {"a": letters, "b": (letters, 0.5)}}
    yield Target(make_reward, several, scored, ("weights", "partial", "timeout"))
    for kind in ("math", "code", "task"):
        options = ("timeout", "retries", "name", "exact", "parallel", "partial")
        # Those of a task read its own column, which these samples lack.
        yield Target(make_reward, {"source": kind}, scored if kind != "task" else bool, options)
    yield Target(verl.Reward(letters).get_reward, {"sequences": ["ab"]}, lambda scores: scores["reward"])
    config = config_of("llama")
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    options = ("tokenizer", "batch_size", "max_length", "dtype", "device", *ON_FAILURE)
    yield Target(verl.Reward, {"model": classifier, "tokenizer": byte_tokenizer()}, scored, options)


def served_rewards(server: str) -> Iterator[Target]:
    judge = ("parse", "scale", "system", "model", "max_tokens", "temperature", "api_key", *ON_FAILURE)
    yield Target(verl.Reward, {"url": server, "template": "{response}"}, served, ("template", *judge))
    service = ("batch_size", "api_key", *ON_FAILURE)
    yield Target(verl.Reward, {"url": f"{server}/score"}, served, service)


def with_record(trainer: dict[str, Any], name: str, record: Any) -> Any:
    """A step of a trainer that is given one of its records."""
    if name == "logging":  # which says where by itself
        trainer = {key: value for key, value in trainer.items() if key != "log_dir"}
    return step(verl.Trainer(**trainer, **{name: record}))


def trainers(actor: verl.Actor) -> Iterator[Target]:
    trainer = {"actor": actor, "reward_fn": letters, "log_dir": False, "n": 2}
    # What signatures say no more by name: `**keywords`.
    flat = sorted({*OTHERS}.union(*(record.model_fields for record in RECORDS.values())) - {"placement", "buffer"})
    yield Target(verl.Trainer, trainer, step, (*flat, "clip_ratio", "kl_coef", "gamma"))
    for name, record in RECORDS.items():
        quiet = {"log_dir": False} if name == "logging" else {}
        yield Target(record, quiet, partial(with_record, trainer, name))
    yield Target(
        verl.AsyncTrainer,
        {**trainer, "batch_size": 2},
        asynchronous_step,
        ("actor", "reward_fn", "sampling", "clip_ratio", "n", "save_every", "deadline"),
        within=cluster,
        further_seconds=SECONDS_OF_PROCESSES,
        share=0.3,
    )
    task = {"algorithm": "grpo", "sources": {"reward": letters}}
    alone = lambda task: step(verl.Trainer(actor, tasks=[task], log_dir=False))  # noqa: E731
    yield Target(verl.Task, {"name": "a", **task, "n": 2}, alone, ("cost",))
    both = [verl.Task(name, "grpo", {"reward": codes}, n=2) for name in ("a", "b")]
    several = {"actor": actor, "tasks": both, "log_dir": False}
    yield Target(
        verl.InterleavedTrainer,
        several,
        interleaved_step,
        ("actor", "tasks", "update_freq", "max_resamples", "deadline"),
    )
    first = verl.Trainer(**trainer)
    yield Target(first.fit, {"prompts": [["ab"], ["cd"]], "steps": 1})
    yield Target(first.step, {"prompts": ["ab"]})
    yield Target(first.evaluate, {"prompts": ["ab"]})
    yield Target(first.add_metric, {"name": "length", "fn": letters}, lambda _: step(first))
    yield Target(first.add_guard, {"guard": SafetyGuard(["reward"])})
    yield Target(first.rollback, {"step": 0})
    yield Target(first.save_checkpoint, {"path": "saved"})
    yield Target(first.load_checkpoint, {"path": "saved"})
    rows = {"rows": load_prompts(["ab"])}
    evaluated = lambda held_out: verl.Trainer(**trainer, held_out=held_out).evaluate_held_out()["metrics"]  # noqa: E731
    yield Target(HeldOut, rows, evaluated)
    yield Target(verl.RolloutNode, {"actor": actor}, lambda node: ran(actor, node))
    yield Target(verl.RewardNode, {"reward": letters}, lambda node: ran(actor, actor, node), ("timeout", "retries"))
    yield Target(verl.UpdateNode, {"updater": verl.Updater("grpo", actor=actor)})
    yield Target(verl.RLDataPipeline, {}, lambda pipeline: pipeline.add_stage("a", actor).run(["ab"]))
    yield Target(verl.RLDataPipeline().add_stage, {"name": "a", "stage": actor}, ran_once)


def data(actor: verl.Actor, samples: Batch) -> Iterator[Target]:
    rows = [{"prompt": "ab", "task": "x"}, {"prompt": "cd", "task": "y"}]
    yield Target(get_dataloader, {"dataset_path": rows}, next)
    yield Target(load_prompts, {"source": rows}, lambda prompts: prompts[0])
    yield Target(verl.OfflineDatasetLoader, {"source": [{"prompt": "a", "response": "b"}]}, next)
    yield Target(DynamicBatchSampler, {"dataset": ["ab", "abc"]}, list)
    yield Target(verl.ResourcePool, {"devices": "cpu:0-1"}, len)
    yield Target(verl.DeviceMesh, {"placement": {"actor": "cpu:0"}}, str)
    batch = Batch.from_columns({"a": [1.0, 2.0]})
    yield Target(batch.take, {"indices": [0, 1]}, len)
    yield Target(batch.slice, {"start": 0}, len)
    yield Target(batch.row, {"index": 0})
    yield Target(batch.add, {"columns": {"b": [1, 2]}}, len)
    yield Target(batch.select, {"names": ["a"]}, len)
    yield Target(batch.drop, {"names": ["a"]}, len)
    yield Target(batch.filter, {"keep": [True, False]}, len)
    yield Target(batch.tensor, {"name": "a"}, lambda column: column.tolist())
    yield Target(samples.lengths, {"name": "response_tokens"})
    yield Target(Batch.from_parquet, {"path": "rows.parquet"}, len)
    yield Target(Batch.concat, {"batches": [batch, batch]}, len)
    yield Target(Batch.from_columns, {"columns": {"a": [1]}}, len)
    yield Target(Batch.from_rows, {"rows": [{"a": 1}]}, len)


def count(text: str) -> int:
    """Letters of a text.

    Args:
        text: the text.
    """
    return len(text)


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(item)


def attempt(target: Target, name: str, value: Any) -> str | None:
    """What is wrong with what came of it; None: nothing."""
    is_accepted = False
    try:
        _limit(SECONDS)
        result = target.call(**{**target.good, name: value})
        is_accepted = True
        _limit(SECONDS + target.further_seconds)
        numbers = list(numbers_of(target.use(result)))
        return None if all(map(math.isfinite, numbers)) else f"numbers that are not finite: {numbers[:5]}"
    except VerlError as error:
        if is_accepted and not re.search(rf"\b{name}\b", str(error)):
            return f"accepted, and its use fails without naming it: {type(error).__name__}: {error}"
        return None if str(error) else "an error without a message"
    except TypeError as error:
        if not is_accepted and re.search(r"(missing|unexpected keyword|positional|multiple values)", str(error)):
            return None
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(target: Target, calls: list[tuple[str, Any]]) -> Iterator[str | None]:
    """The same of each call, in a forked process, which ends when one takes more than `SECONDS` or `BYTES`; then
    another one goes on."""
    done = 0
    while done < len(calls):
        with tempfile.TemporaryFile("w+") as file:
            if (pid := os.fork()) == 0:
                try:
                    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
                    with target.within():
                        for name, value in calls[done:]:
                            print(json.dumps(attempt(target, name, value)), file=file, flush=True)
                finally:
                    os._exit(0)
            _, status = os.waitpid(pid, 0)
            file.seek(0)
            results = [json.loads(line) for line in file]
        done += len(results)
        yield from results
        if done < len(calls):  # the next one ended it
            done += 1
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
            yield f"more than {SECONDS:g} s" if late else f"it ended the process (status {status})"


def _limit(seconds: float) -> None:
    """Give what comes next these seconds, and its bytes beyond what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def check(targets: Iterable[Target], share: float = 1.0) -> int:
    """So many calls of all, drawn at random; how many there were. Fails with every call that went wrong."""
    rng, wrong, count = random.Random(0), [], 0
    for target in targets:
        calls = [call for call in itertools.product(target.names, ODD) if rng.random() < share * target.share]
        count += len(calls)
        for (name, value), problem in zip(calls, outcomes(target, calls), strict=True):
            if problem:
                wrong.append(f"{target.call.__qualname__}({name}={shown(value)}): {problem}")
    assert not wrong, "\n".join(wrong)
    return count


def in_process(folder: Path, server: str, share: float) -> int:
    """`check` of all calls, in a process that is connected to nothing of this one's tests."""
    code = "import sys; from tests import test_public_calls; test_public_calls.main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), server, str(share)]
    done = forked.run(command, cwd=folder, timeout=3000)
    assert not done.returncode, f"{done.stdout}\n{done.stderr[-3000:]}"
    return int(done.stdout.split()[-1])  # after what the calls printed


def main(folder: str, server: str, share: str) -> None:
    print(check(targets(Path(folder), server), float(share)))


def test_odd_arguments_are_refused_by_name(tmp_path: Path, serve: Callable[..., Plain]) -> None:
    assert in_process(tmp_path, serve(1).url, 0.004) >= 100


def misspelt_calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any], str]]:
    """A call of each public name with a keyword that is nearly one of its own, and that one."""
    trainers = dict.fromkeys(("Trainer", "PPOTrainer", "AsyncTrainer"), "reward_fn")
    handles = ("FSDPWorker", "HuggingFaceWorker", "MegatronWorker", "VLLMActor", "VLLMActorModel")
    further = {"Actor": "tokenizer", "Critic": "tokenizer", "ActorRolloutRefWorker": "temperature"}
    further |= trainers | dict.fromkeys(handles, "temperature") | {"Reward": "reward_fn"}
    for name in verl.__all__:
        call = getattr(verl, name)
        if not callable(call) or name == "BaseAlgorithm":
            continue
        parameters = inspect.signature(call).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            own = [further[name]] if name in further else []
        for keyword in own[-1:]:
            yield call, {f"{keyword}_": 1}, keyword
    yield type(make_algorithm("grpo")), {"kl_coeff": 1}, "kl_coef"


def test_a_misspelt_keyword_of_any_public_constructor_is_named_with_the_nearest(tiny: Path) -> None:
    wrong = []
    for call, keywords, nearest in misspelt_calls():
        first = next(iter(inspect.signature(call).parameters), "")
        if call is verl.AsyncTrainer:
            keywords["batch_size"] = 2
        try:
            call(*([str(tiny)] if first in ("model", "actor", "model_name", "model_path") else []), **keywords)
        except ConfigError as error:
            if f"did you mean '{nearest}'?" in str(error):
                continue
            wrong.append(f"{call.__name__}: {error}")
        except Exception as error:
            wrong.append(f"{call.__name__}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_task_takes_its_reward_by_name() -> None:
    task = verl.Task("a", "grpo", reward=letters)
    assert [*task.sources] == ["reward"] and task.sources["reward"].get_reward(["ab"])["reward"] == [2.0]
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        verl.Task("a", "grpo", rewards=letters)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [-math.inf, None, "", 3])
def test_what_is_registered_has_a_text_as_its_name(name: Any) -> None:
    for register in (verl.register_node, verl.register_algorithm, verl.register_reward):
        with pytest.raises(ConfigError, match=r"name: must be (a )?text"):
            register(name)


def test_a_hook_is_a_function_and_an_object_without_a_text_is_named_by_its_type() -> None:
    from verl.report.sinks import Logger

    with pytest.raises(ConfigError, match="fn: must be a function, not null"):
        Logger().on_log_hook(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not such a Mute"):
        verl.Task(n=Mute())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not such a Mute"):
        verl.RolloutNode(Mute())  # type: ignore[arg-type]


def test_all_of_the_api_reference_is_called(tmp_path: Path) -> None:
    names = re.findall(r"^::: (\S+)", (Path(verl.__file__).parents[1] / "docs" / "api.md").read_text(), re.MULTILINE)
    called = {target.call for target in targets(tmp_path, "http://127.0.0.1:9")}
    # Of these, the methods are called, and what is made by name.
    assert {name for name in names if pkgutil.resolve_name(name) not in called} == {"verl.Batch", "verl.BaseAlgorithm"}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda x: time.sleep(60), "more than 1 s"),
        (lambda x: bytearray(2 * BYTES), "MemoryError"),
        (lambda x: os._exit(3), "ended the process"),
        (lambda x: [math.nan], "not finite"),
        (lambda x: x.y, "AttributeError"),
    ],
)
def test_what_takes_too_much_or_ends_is_told(call: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1.0)
    fine = Target(lambda x: call(x) if x == 1 else None, {}, lambda value: value)
    assert [bool(told) and problem in told for told in outcomes(fine, [("x", 0), ("x", 1), ("x", 2)])] == [0, 1, 0]


@pytest.mark.slow
def test_every_odd_argument_is_refused_by_name(tmp_path: Path, serve: Callable[..., Plain]) -> None:
    assert in_process(tmp_path, serve(1).url, 0.2) >= 3000
