"""The schema of a run's settings: frozen, without unknown keys, checked when built, imported without torch.

The sections of models and of training are the records that constructors take: `ModelOptions`, `TrainOptions`.
A field that is `free` does not change the numbers of a run, and so stays out of its hash.
"""

from __future__ import annotations

import math
from functools import partial
from os.path import expanduser
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from verl._base.record import (
    AsTuple,
    AtOnce,
    Count,
    FunctionPath,
    Natural,
    NotNegative,
    Portion,
    Processes,
    Record,
    Retries,
    Seconds,
    Seed,
    Share,
    Staleness,
    Strings,
    cost,
    function_path,
    limit,
    matching,
    output,
    result,
    wrong,
)
from verl.config.tasks import AlgorithmName, TaskConfig
from verl.data.pools import PoolOptions
from verl.errors import nearest
from verl.models.options import Dtype, ModelOptions
from verl.rewards.registry import REWARDS
from verl.rollout.options import RolloutOptions, Temperature
from verl.training.options import TrainOptions, TrainSettings

#: The metric of `trainer.eval_metrics` that is not a function: it needs a model.
KL = "kl"


def is_by_task(source: Any) -> bool:
    """Whether this is a mapping of tasks to a source each."""
    if not isinstance(source, dict) or source.keys() & {"task", "path"}:
        return False
    return bool(source) and all(isinstance(part, str | dict) for part in source.values())


def mixed(source: Any) -> dict[str, float]:
    """The files of `{path: [FILE, ...], weights: [NUMBER, ...]}` with their weights; empty for any other source.

    Raises:
        ValueError: there is not one positive weight for each of several files.
    """
    if not isinstance(source, dict) or "weights" not in source:
        return {}
    paths, weights = source.get("path"), source["weights"]
    if not (isinstance(paths, list) and isinstance(weights, list) and len(set(paths)) == len(paths) == len(weights)):
        raise ValueError("weights are a list of one number for each file of a list, path: [FILE, ...]")
    if not all(type(weight) in (int, float) and 0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be numbers above 0, not {weights}")
    return dict(zip(paths, map(float, weights), strict=True))


def _source(value: str | dict[str, Any]) -> str | dict[str, Any]:
    """A key that is null is not there: so an override takes it out of the file's mapping."""
    if isinstance(value, str):
        return expanduser(value)
    fields = {key: item for key, item in value.items() if item is not None}
    if is_by_task(fields):
        return {key: _source(part) for key, part in fields.items()}
    match fields.get("path"):
        case str(path):
            return {**fields, "path": expanduser(path)}
        case [*paths]:
            return {**fields, "path": [expanduser(path) if isinstance(path, str) else path for path in paths]}
    return fields


def _eval_metric(value: str) -> str:
    if value != KL and ":" not in value:
        raise ValueError(f"must be kl, or a function as FILE.py:FUNCTION, not '{value}'")
    return value if value == KL else function_path(value)


DirectoryName = Annotated[
    str,
    AfterValidator(partial(matching, pattern=r"\w[\w.-]*", rule="letters, digits and . _ - with no / or space")),
]
Logger = Literal["console", "tensorboard", "wandb", "trackio", "mlflow"]
#: A parquet or JSONL file (or several), or a procedural task with its options.
Source = Annotated[str | dict[str, Any], AfterValidator(_source)]


class RefConfig(Record):
    path: str | None = result(None, "model of the reference policy (null: the actor as it is at the start)")
    dtype: Dtype | None = result(None, "its precision (null: the actor's)")


class ActorRolloutRefConfig(Record):
    model: ModelOptions = Field(ModelOptions(), description="the policy")
    actor: TrainOptions = Field(TrainOptions(), description="training of the policy")
    rollout: RolloutOptions = Field(RolloutOptions(), description="generation")
    ref: RefConfig = Field(RefConfig(), description="the reference policy, for algorithms that use one")

    def _check(self) -> None:
        if self.model.path is None:
            raise wrong("model.path", "is missing: give a model directory or a hub name")
        if self.model.lora is not None and self.ref.dtype is not None and self.ref.path is None:
            raise wrong("ref.dtype", "the reference of an actor with adapters is that actor without them: leave it out")


class CriticConfig(TrainSettings):
    """The value model, for algorithms that use one, and how it is trained."""

    model: ModelOptions = Field(ModelOptions(), description="the value model")

    def options(self, actor: TrainOptions) -> TrainOptions:
        """With options of FSDP and DeepSpeed, which are the actor's where both have that strategy."""
        settings = {name: getattr(self, name) for name in TrainSettings.model_fields}
        like = actor if actor.strategy == self.strategy else TrainOptions()
        return TrainOptions(**settings, fsdp_config=like.fsdp_config, deepspeed_config=like.deepspeed_config)


class AlgorithmConfig(Record):
    """The algorithm and its own options, which the algorithm checks by its own fields."""

    model_config = ConfigDict(extra="allow")
    name: AlgorithmName | None = result(
        None,
        "the algorithm (null: the default one), or a class of your own, as FILE.py:CLASS; its options "
        "stand beside its name",
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options as given, without the name."""
        return dict(self.model_extra or {})


class DataConfig(Record):
    train: Source | None = result(
        None,
        "training prompts or recorded responses: a parquet or JSONL file; or {task: NAME, size: N, ...}; "
        "{path: [FILE, FILE], weights: [0.7, 0.3]} draws by shares; "
        "for several tasks {NAME: such a source, ...}, or one whose rows name their task in the column task",
    )
    eval: Source | None = output(None, "held-out problems or rows, in the same form; prompts of training are left out")
    prompt_column: str | None = result(None, "column that holds the prompt (null: prompt, messages, question, ...)")
    columns: dict[str, str] = result(
        {},
        "of recorded data: what they call a column, such as {prompt: input, completion: output} or {chosen: better, "
        "rejected: worse}",
        added=True,
    )
    prompt_template: str | None = result(
        None, "text with {prompt} in the prompt's place, other columns by name; {{ is a {"
    )
    system_prompt: str | None = result(None, "system message that starts each chat")
    chat: bool | None = result(
        None, "put plain prompts in the chat template (null: a task's questions are, others not)"
    )
    chat_template_kwargs: dict[str, Any] = result(
        {},
        "variables of the chat template, such as {enable_thinking: false}; those of a row take precedence",
        added=True,
    )
    batch_size: AtOnce = result(
        32, "prompts (of recorded data: groups, such as pairs) per step (also: rollout_batch_size)"
    )
    shuffle: bool = result(True, "a new order of the prompts each epoch")
    max_prompt_length: Count | None = result(None, "longest prompt, in tokens (null: what the model can take)")
    max_response_length: Count | None = result(
        None, "recorded responses are cut off after this many tokens (null: never)"
    )
    truncation: Literal["left", "right", "drop", "error"] = result(
        "error", "what happens to a longer prompt: cut at that side, dropped, or an error"
    )
    pools: PoolOptions | None = result(
        None,
        "draw prompts less of which all samples are solved or all fail: {solved, failed, decay, metric, "
        "solved_at, failed_at} (null: every prompt once an epoch)",
        added=True,
    )

    def _check(self) -> None:
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template.replace("{{", ""):
            raise wrong("prompt_template", "must contain {prompt}, where the prompt goes")
        for name in ("train", "eval"):
            source = getattr(self, name)
            try:
                is_mixed = bool(mixed(source))
            except ValueError as error:
                raise wrong(name, str(error)) from None
            if is_mixed and name == "eval":
                raise wrong(name, "has no weights: all held-out rows count alike")
            for task, part in source.items() if is_by_task(source) else [(None, source)]:
                if isinstance(part, dict) and task is not None and "weights" in part:
                    raise wrong(name, f"mixes no files for task '{task}': give weights to a run of one task")
                if isinstance(part, dict) and bool(part.get("task")) == bool(part.get("path")):
                    of = "" if task is None else f" for task '{task}'"
                    raise wrong(name, f"must name{of} either a task (task: NAME) or a file (path: FILE)")


class RewardPart(Record):
    """Where a reward comes from: exactly one of a function, a built-in, a model, a server."""

    path: FunctionPath | None = result(None, "a function of your own, as FILE.py:FUNCTION")
    name: str | None = result(
        None, "a reward by name: task (its own verifier), code (tests in a sandbox), math, or a registered one"
    )
    model: str | None = result(None, "a reward model: directory or hub name")
    dtype: Dtype = result("auto", "precision of the reward model (auto: as in the files)")
    url: Strings = result((), "addresses of a scoring service; with template, of an LLM judge")
    template: str | None = result(None, "what the judge reads, with {prompt}, {response} and columns by name in it")
    scale: Annotated[tuple[float, float], AsTuple] | None = result(
        None, "the least and the most that the judge may give (null: 0 to 10)"
    )
    answer: Literal["last_number", "whole", "tag"] = result(
        "whole", "what a verifier reads: the last number, all, or what <answer> encloses"
    )

    def _check(self) -> None:
        if self.name is not None and self.name not in REWARDS:
            raise wrong("name", f"no reward is called '{self.name}': {nearest(self.name, REWARDS)}")
        if self.answer != "whole" and self.name is None:
            raise wrong("answer", "is for built-in rewards (name); a function or model reads the whole response")
        if self.dtype != "auto" and self.model is None:
            raise wrong("dtype", "is for a reward model: it needs model")
        if self.template is not None and (not self.url or "{response}" not in self.template):
            raise wrong("template", "is for a judge: it needs url, and {response} in the template")
        if self.scale is not None and (
            self.template is None or not -math.inf < self.scale[0] < self.scale[1] < math.inf
        ):
            raise wrong("scale", "is the least and the most of a judge's score, lower first: it needs template")

    def origins(self) -> list[str]:
        """Which of the origins are set."""
        names = ("path", "name", "model", "url", "components")
        return [name for name in names if getattr(self, name, None) not in (None, (), {})]


class RewardComponent(RewardPart):
    """One of several rewards."""

    weight: float = result(1.0, "factor in the sum of rewards")


class CostConfig(RewardPart):
    """A reward, or a cost, which is called as the reward is (`reward.timeout` and so on)."""

    components: dict[str, RewardComponent] = result(
        {}, "several rewards by name, each with path, name, model or url, and weight; summed"
    )

    def _check(self) -> None:
        super()._check()
        if len(origins := self.origins()) > 1:
            message = "give one of path, name, model, url and components"
            raise PydanticCustomError("several", "{message}", {"message": message, "keys": " ".join(origins)})
        for name, part in self.components.items():
            if len(part.origins()) != 1:
                raise wrong(f"components.{name}", "needs exactly one of path, name, model and url")


class RewardConfig(CostConfig):
    timeout: Seconds = limit(
        30.0, "seconds for one call: a prompt's samples; with workers one sample, with url one request"
    )
    retries: Retries = limit(1, "further tries after a failure")
    on_failure: Literal["abstain"] | float = result("abstain", "a sample without a score abstains, or gets this number")
    max_failure_rate: Portion = limit(
        0.5,
        "the run ends if more than this share of the latest 256 samples failed, once there are 64; the "
        "reward's is for failed episodes, too; below 1, a run in which every sample failed also ends so",
    )
    workers: Annotated[int, Field(ge=0, le=1024)] = cost(
        0, "processes that score, one sample at a time each (0: see process)"
    )
    process: bool = cost(
        True,
        "call a function in a separate process, which is killed when it is late (false, and for a function that "
        "uses a model: in the trainer's, which ends if the function holds the GIL beyond timeout)",
    )
    files: Strings = limit(
        (),
        "files that your code reads; a change between two attempts is refused, as of the code",
        added=True,
        free=True,
    )
    max_workers: Processes | None = cost(
        None, "most such processes, when samples queue up (null: always `workers`)", free=True
    )

    def _check(self) -> None:
        super()._check()
        if self.max_workers is not None and not 1 <= self.workers <= self.max_workers:
            raise wrong("max_workers", f"is the most that workers ({self.workers}) may grow to: 1 <= workers <= it")


class GuardConfig(Record):
    """See `SafetyGuard`."""

    monitor_metrics: Strings = result(description="metrics of the log record, such as reward or eval/accuracy")
    threshold_delta: float = result(-0.15, "change that counts: -0.15 is a fall by 15 %")
    rollback_steps: Count = result(100, "how far to go back, in steps")
    absolute: bool = result(False, "threshold_delta is in the metric's own unit")
    window: Count = result(10, "latest values that are compared with the baseline")
    baseline: Annotated[int, Field(ge=2, lt=2**31)] = result(30, "values in a row of a baseline")
    max_rollbacks: Natural = limit(3, "after so many, the next fall ends the run")

    def _check(self) -> None:
        if not self.threshold_delta:
            raise wrong("threshold_delta", "is 0: a change is below 0 for a fall, above 0 for a rise")
        if not self.monitor_metrics:
            raise wrong("monitor_metrics", "is empty: name what is watched")


class TaskSchedulerConfig(Record):
    """See `DynamicTaskWeightScheduler`."""

    initial_weights: dict[str, NotNegative] = result(description="of tasks; others keep their shares")
    metric_key: str = result("reward_score", "a task's metric that is to be high")
    patience: Count = result(500, "steps without a gain after which a task has converged")
    min_weight: Share = result(0.1, "least share of a task")


# These three are also of `Trainer`, which takes their fields by the same names: a setting of both is added here alone.
class SavingSettings(Record):
    async_save: bool = cost(False, "write checkpoints while training goes on, from a copy in host memory", free=True)


class LimitSettings(Record):
    deadline: Seconds = limit(1800.0, "seconds after which a phase without progress ends the run", free=True)
    max_resamples: Natural = limit(4, "further rollouts in one step when an algorithm rejects samples")
    max_skipped_updates: Count = limit(5, "updates in a row that may be skipped for a non-finite loss or gradient")


class UpdateSettings(Record):
    skip_zero_advantage_rows: bool = cost(
        True,
        "rows whose gradient is known to be 0, such as samples of a prompt that all scored alike, are not computed in "
        "updates; metrics of the update's forward pass are then means over the other rows (false: all are computed)",
        free=True,
    )


class TrainerConfig(SavingSettings, LimitSettings, UpdateSettings):
    total_steps: Natural = limit(100, "steps; a longer run goes on from a shorter one", free=True)
    total_epochs: Count | None = limit(None, "passes over data.train, instead of total_steps", free=True)
    seed: Seed = result(0, "seed of everything random")
    project: str = output("verl", "the project's name in W&B and MLflow", free=True)
    run_name: DirectoryName | None = output(
        None, "first part of the run directory's name (null: algorithm, model and data)", free=True
    )
    output_dir: Annotated[str, AfterValidator(expanduser)] = output("runs", "where run directories are made", free=True)
    eval_every: Count | None = output(
        None, "steps between evaluations (null: only before the first and after the last step)"
    )
    eval_n: AtOnce = output(1, "samples per held-out problem")
    eval_temperature: Temperature = output(0.0, "temperature of evaluation (0: greedy)")
    eval_top_p: Annotated[float, Field(gt=0, le=1)] | None = output(
        None, "probability mass that evaluation samples within (null: rollout.top_p)", added=True
    )
    eval_top_k: Natural | None = output(
        None, "evaluation samples among the k likeliest tokens (0: all; null: rollout.top_k)", added=True
    )
    eval_before: bool = output(True, "evaluate before the first step, too", added=True)
    eval_metrics: Annotated[tuple[Annotated[str, AfterValidator(_eval_metric)], ...], AsTuple] = output(
        (),
        "metric functions of your own over evaluated samples, as FILE.py:FUNCTION; kl: the KL to the "
        "reference policy, as kl/eval, for which the initial actor (or ref.path) is kept in memory",
    )
    save_every: Count | None = output(10, "steps between checkpoints (null: only at the end)", free=True)
    keep_checkpoints: Count = output(2, "how many checkpoints to keep", free=True)
    resume: bool = output(True, "continue an unfinished run (false: start a new one, as --fresh does)", free=True)
    loggers: Annotated[tuple[Logger, ...], AsTuple] = output(
        ("console", "tensorboard"), "where metrics go besides metrics.jsonl", free=True
    )
    max_staleness: Staleness | None = result(
        None, "train asynchronously: steps that a sample may be behind the policy it trains (null: synchronous)"
    )
    timeline: bool = output(
        False, "write timeline.json, a Chrome trace of what worked when, into the run directory", free=True
    )
    log_completions: Natural = output(64, "samples kept of each evaluation, to be read", free=True)
    control: Literal["permute_rewards", "zero_lr"] | None = result(
        None, "a run that should learn nothing: shuffled rewards, or learning rate 0"
    )
    guards: Annotated[tuple[GuardConfig, ...], AsTuple] = result(
        (), "metrics whose fall takes training back to an earlier checkpoint"
    )
    task_scheduler: TaskSchedulerConfig | None = result(
        None,
        "change the shares of several tasks by their progress: {initial_weights: {TASK: SHARE}, "
        "metric_key, patience, min_weight} (null: fixed shares)",
    )
    threads: Count | None = cost(None, "CPU threads (null: as torch chooses)")
    placement: dict[str, Any] | str | None = cost(
        None,
        "role -> devices, such as {rollout: cuda:0, actor: cuda:1-3} (null: all ranks of a torchrun job)",
        free=True,
    )

    def _check(self) -> None:
        if self.total_epochs is not None and self.total_steps != type(self).model_fields["total_steps"].default:
            raise wrong("total_epochs", "is given in the place of total_steps: leave one of them out")


class Config(Record):
    """All settings of a run."""

    actor_rollout_ref: ActorRolloutRefConfig = Field(description="the policy: its model, training, generation")
    critic: CriticConfig = Field(CriticConfig(), description="value model, for algorithms that use one")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="what is optimised")
    data: DataConfig = Field(DataConfig(), description="prompts or recorded responses")
    reward: RewardConfig = Field(RewardConfig(), description="what is good")
    cost: CostConfig = Field(CostConfig(), description="what is kept below a limit, for algorithms that have a cost")
    tasks: Annotated[tuple[TaskConfig, ...], AsTuple] = result(
        (), "several tasks that train the one actor, instead of algorithm, reward and cost"
    )
    trainer: TrainerConfig = Field(TrainerConfig(), description="length, evaluation, checkpoints, logs")

    def _check(self) -> None:
        names = [task.name for task in self.tasks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise wrong("tasks", f"two have the name '{twice}': give each its own")
        sections = {"algorithm": AlgorithmConfig(), "reward": RewardConfig(), "cost": CostConfig()}
        if self.tasks and (set_too := [name for name, usual in sections.items() if getattr(self, name) != usual]):
            raise wrong(set_too[0], "is of a run of one task: each of the tasks has its own, so leave it out")
        prompts, n = self.data.batch_size, self.actor_rollout_ref.rollout.n
        updates = {"actor_rollout_ref.actor": self.actor_rollout_ref.actor, "critic": self.critic}
        for role, update in updates.items():
            if not self.tasks and (update.mini_batch_size or 0) > prompts * n:
                step = f"{prompts * n} samples of a step (data.batch_size {prompts} x rollout.n {n})"
                message = f"must be at most the {step}, not {update.mini_batch_size}"
                raise wrong(f"{role}.mini_batch_size", message)
        for name in ("num_rollout_workers", "max_rollout_workers", "transport"):
            usual = RolloutOptions.model_fields[name].default
            if self.trainer.max_staleness is None and getattr(self.actor_rollout_ref.rollout, name) not in (usual, 1):
                raise wrong(
                    f"actor_rollout_ref.rollout.{name}",
                    "is for asynchronous training: set trainer.max_staleness to 1 or more",
                )
        if self.trainer.guards and self.trainer.max_staleness is not None:
            raise wrong("trainer.guards", "go back between synchronous steps: leave trainer.max_staleness out")
        if self.trainer.task_scheduler is not None:
            if len(names) < 2:
                raise wrong("trainer.task_scheduler", "weighs several tasks against each other: name them in tasks")
            for stray in sorted(self.trainer.task_scheduler.initial_weights.keys() - {*names}):
                raise wrong("trainer.task_scheduler", f"weighs task '{stray}': {nearest(stray, names)}")
        of_evaluation = ("every", "n", "top_p", "top_k", "temperature", "before", "metrics")
        for name in (*(f"eval_{name}" for name in of_evaluation), "log_completions"):
            if self.data.eval is None and getattr(self.trainer, name) != TrainerConfig.model_fields[name].default:
                raise wrong(f"trainer.{name}", "is set, but data.eval names no problems to evaluate on")
        if self.trainer.total_steps == 0 and self.data.eval is None:
            raise wrong("trainer.total_steps", "is 0 and data.eval names nothing to evaluate on: nothing would run")
