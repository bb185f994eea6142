"""`verl eval`: models on held-out problems, scored as training scores them; nothing is learned."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.batch import Batch
from verl.checkpoint.store import MANIFEST
from verl.config import Config
from verl.data.prompts import PromptDataset
from verl.dataflow.graph import Node
from verl.errors import ConfigError
from verl.run.build import build_actor, rewarding_episode, sources_of
from verl.run.data import prompts_of
from verl.run.export import export
from verl.trainer.evaluation import Evaluation, Interval, accuracy, binomial_interval, paired_bootstrap
from verl.trainer.task import Task, check_reads
from verl.trainer.trainer import Trainer

# Seconds between two reports of progress.
_SHOW_EVERY = 10.0
#: By metric, a number for each problem (None: it has none), its samples averaged.
_Scores = dict[str, list[float | None]]


def evaluate_models(
    config: Config, models: Sequence[str], *, limit: int | None = None, tell: Callable[[str], object] = print
) -> dict[str, Any]:
    """Evaluate one model, or two on the same problems.

    Args:
        config: `data.eval` and the reward as in training; `trainer.eval_*` say how problems are sampled.
        models: directories, names of the hub, runs or checkpoints.
        limit: the first problems only.
        tell: is called with lines of progress.

    Returns:
        {"models": [{model, problems, abstained (responses), metrics}, ...], "gains"}. Metrics, and of two models the
        gains of the second over the first, are {name: {value, low, high}}: the mean over problems and its 95 %
        interval. There is "reward", and where answers are right or wrong (by the task's own verifier, or because every
        reward is 0 or 1) "accuracy" and, of n samples a problem, "pass@k".

    Raises:
        ConfigError: there are no problems or no reward, or the settings are of several tasks.
        DataError: problems cannot be read, or lack what the reward reads.
        ModelError, CheckpointError: a model cannot be loaded.
    """
    task = _task(config)
    problems = prompts_of(config, config.data.eval, limit)
    check_reads({f"data.eval ({problems.name})": problems.batch}, [task.sources["reward"].source])
    rows, scores = [], []
    for model in models:
        evaluation = _evaluate(config, task, model, problems, tell)
        scores.append(_by_problem(evaluation, config.trainer.eval_n))
        metrics = {name: asdict(_interval(name, values)) for name, values in scores[-1].items()}
        abstained = int(evaluation.metrics["abstained"])
        rows.append({"model": model, "problems": len(problems), "abstained": abstained, "metrics": metrics})
    first, last = scores[0], scores[-1]
    names = [name for name in first if name in last and len(scores) == 2]
    return {"models": rows, "gains": {name: asdict(paired_bootstrap(first[name], last[name])) for name in names}}


def _task(config: Config) -> Task:
    if config.tasks:
        raise ConfigError("verl eval measures one task: leave `tasks` out, and give that task's reward and data")
    if config.data.eval is None:
        raise ConfigError("data.eval names no problems to evaluate on: give DATA")
    episode = rewarding_episode(config)
    if not config.reward.origins() and episode is None:
        raise ConfigError("no reward is given: --reward FILE.py:FUNCTION, task or NAME (see docs/rewards.md)")
    return Task(reward=sources_of(config).get("reward"), episode=episode)


def _evaluate(
    config: Config, task: Task, model: str, problems: PromptDataset, tell: Callable[[str], object]
) -> Evaluation:
    settings, policy = config.trainer, config.actor_rollout_ref
    sampling = {name: getattr(settings, f"eval_{name}") for name in ("n", "temperature", "top_p", "top_k")}
    task = copy(task)
    task.nodes = [*task.nodes, _progress(model, len(problems) * settings.eval_n, tell)]
    with _as_model(model) as path:
        policy = policy.replace(model=policy.model.replace(path=path))
        actor = build_actor(config.replace(actor_rollout_ref=policy), "lm", 1)
        trainer = Trainer(actor, tasks=[task], log_dir=False)
        try:
            return trainer.evaluate(problems, {"accuracy": accuracy}, **sampling)
        finally:
            trainer.close()
            del trainer, actor, task
            gc.collect()  # the next model may need the memory


@contextmanager
def _as_model(model: str) -> Iterator[str]:
    """A model's directory or name; a run or checkpoint is exported for the time being."""
    path = Path(model)
    if not (path / MANIFEST).exists() and not (path / "checkpoints").is_dir():
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        export(path, Path(folder) / "model")
        yield str(Path(folder) / "model")


def _progress(model: str, total: int, tell: Callable[[str], object]) -> Node:
    """A node that counts scored samples."""
    done, shown = 0, time.monotonic()

    def count(rows: Batch) -> None:
        nonlocal done, shown
        done += len(rows)
        if time.monotonic() > shown + _SHOW_EVERY:
            shown = time.monotonic()
            tell(f"{model}: {done} of {total} responses")

    return Node(name="progress", run=count, inputs=("reward",))


def _by_problem(evaluation: Evaluation, n: int) -> _Scores:
    rewards, right = evaluation.rows["reward"], evaluation.rows["accuracy"]
    scores = {"reward": evaluation.by_problem("reward")}
    if {*right} == {None} and {*rewards} <= {0.0, 1.0, None}:
        right = evaluation.rows["accuracy"] = rewards
    if {*right} == {None}:
        return scores
    scores = {"accuracy": evaluation.by_problem("accuracy")} | scores
    groups = evaluation.samples.group_indices()
    ks = sorted({n, *(2**power for power in range(n.bit_length()))} - {1})
    if {*right} <= {0.0, 1.0, None}:  # part marks are no passes
        scores |= {f"pass@{k}": [pass_at([right[row] for row in rows], k) for rows in groups] for k in ks}
    return scores


def pass_at(right: Sequence[float | None], k: int) -> float | None:
    """The chance that one of k samples is right, drawn without replacement from a problem's samples (Chen et al. 2021);
    None if fewer than k were scored."""
    scored = [value for value in right if value is not None]
    wrong = scored.count(0.0)
    return None if len(scored) < k else 1 - math.comb(wrong, k) / math.comb(len(scored), k)


def _interval(metric: str, problems: Sequence[float | None]) -> Interval:
    """The mean over problems: Wilson's interval of a share, else a bootstrap over problems."""
    values = [value for value in problems if value is not None]
    if metric == "reward":
        return paired_bootstrap([0.0] * len(values), values)
    return binomial_interval(min(math.fsum(values), len(values)), len(values))
