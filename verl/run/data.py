"""The data of a run: found and read without a model, then tokenised for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from verl._base.record import MOST_AT_ONCE
from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.config import Config
from verl.config.schema import is_by_task, mixed
from verl.data.files import recorded_files
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader
from verl.data.prefetch import Loader
from verl.data.prompts import PromptDataset, check_disjoint, load_prompts
from verl.data.task_loader import COLUMN, MixedLoader, TaskLoader, by_task
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl.roles.actor import Actor
    from verl.trainer.task import Task

Data: TypeAlias = PromptDataset | OfflineDatasetLoader
#: Settings under the names that the readers of prompts and of recorded data have for them.
_OF_PROMPTS = ("prompt_column", "system_prompt", "chat", "chat_template_kwargs")
_OF_RECORDED = (
    "batch_size", "shuffle", "system_prompt", "chat_template_kwargs", "max_response_length", "truncation", "columns"
)  # fmt: skip


class ReadData(NamedTuple):
    """What `data.train` and `data.eval` name, read and not tokenised yet.

    `train` is by task; of one task that is trained on several files, by their numbers, with the `shares` of these.
    """

    train: dict[str, Data]
    held_out: Data | None
    shares: Mapping[str, float]

    @property
    def rows(self) -> int:
        """Rows of training."""
        return sum(map(len, self.train.values()))


def is_offline(config: Config, algorithm: BaseAlgorithm) -> bool:
    """Whether the run learns from recorded responses: the algorithm always does, or the data are experience."""
    files = _file(config.data.train) or [*mixed(config.data.train)]
    return not algorithm.online or (not config.tasks and bool(recorded_files(files)))


def read_data(config: Config, algorithms: Mapping[str, BaseAlgorithm]) -> ReadData:
    """The training and held-out data, for the algorithms of a run by task.

    Raises:
        DataError: the data are unusable; see `load_prompts` and `OfflineDatasetLoader`; or a task without data.
        ConfigError: data of a kind that an algorithm cannot learn from.
    """
    if config.data.train is None:
        raise ConfigError("data.train is missing: give a JSONL or Parquet file, or {task: NAME, ...}")
    if config.tasks:
        return ReadData(_train_by_task(config, algorithms), _held_out_by_task(config, algorithms), {})
    ((name, algorithm),) = algorithms.items()
    weights, recorded = mixed(config.data.train), is_offline(config, algorithm)
    # Numbers, not paths: ids begin with them, ids seed the samples, and a run does not depend on where its files lie.
    shares = {str(number): weight for number, weight in enumerate(weights.values())}
    parts: dict[str, Any] = dict(zip(shares, weights, strict=True)) or {name: config.data.train}
    train = {
        key: _recorded(config, source, "train") if recorded else prompts_of(config, source)
        for key, source in parts.items()
    }
    if (held_out := config.data.eval) is None:
        return ReadData(train, None, shares)
    # An online algorithm may learn from what is recorded; it is judged by its own samples.
    online = algorithm.online
    return ReadData(train, prompts_of(config, held_out) if online else _recorded(config, held_out, "eval"), shares)


def step_rows(config: Config, data: ReadData, tasks: Sequence[Task]) -> int:
    """Rows that one step learns from; about, where the samples of a prompt differ in number.

    Raises:
        ConfigError: a mini-batch would be larger.
    """
    shares = data.shares or {task.name: task.share for task in tasks}
    total = sum(shares[name] for name in data.train)
    drawn = dict.fromkeys(data.train, tasks[0].n) if data.shares else {task.name: task.n for task in tasks}
    each = [
        (drawn[name] if isinstance(rows, PromptDataset) else len(rows.batch) / len(rows)) * shares[name] / total
        for name, rows in data.train.items()
    ]
    rows = ceil(config.data.batch_size * sum(each))
    if rows > MOST_AT_ONCE:
        raise ConfigError(
            f"a step would have {rows:,} rows (data.batch_size times samples a prompt), and all are held in memory at "
            f"once: lower data.batch_size or n to {MOST_AT_ONCE:,} rows at most"
        )
    kinds = ", ".join(dict.fromkeys(getattr(rows, "kind", "prompts") for rows in data.train.values()))
    for key, update in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
        if (update.mini_batch_size or 0) > rows:
            raise ConfigError(
                f"{key}.mini_batch_size must be at most the {rows} rows of a step (data.batch_size "
                f"{config.data.batch_size} of {kinds}), not {update.mini_batch_size}"
            )
    return rows


def in_steps(config: Config, data: ReadData) -> Config:
    """The settings with `trainer.total_epochs`, if it is given, as steps, the last of which has what is left.

    Raises:
        ConfigError: the run has several tasks.
    """
    if config.trainer.total_epochs is None:
        return config
    if config.tasks:
        raise ConfigError("trainer.total_epochs: each of several tasks has data of its own: give trainer.total_steps")
    steps = ceil(config.trainer.total_epochs * data.rows / config.data.batch_size)
    return config.replace(trainer=config.trainer.replace(total_steps=steps, total_epochs=None))


def build_data(
    config: Config, actor: Actor, data: ReadData, epochs: int | None = None
) -> tuple[Loader, PromptDataset | Batch | None, list[str]]:
    """The data, tokenised; what is held out and has a prompt of the training data is left out.

    Args:
        epochs: after which training ends: their last batch has what is left. Not of several files, which are drawn by
            their shares.

    Returns:
        Training batches without end; what is held out, problems to sample and score or recorded rows whose loss is
        measured (None: no evaluation); and notes on rows that were dropped or truncated.

    Raises:
        DataError: a prompt or a row is too long, or nothing is left; see `tokenize_prompts`.
    """
    notes: list[str] = []
    train = {name: _tokenized(config, rows, actor, "train", notes) for name, rows in data.train.items()}
    held_out = None if data.held_out is None else _tokenized(config, data.held_out, actor, "eval", notes)
    unseen = None if held_out is None else _unseen(held_out, train, notes)
    # Of several sources each loader yields one prompt at a time, and the one over them makes the batch.
    batch_size, seed = config.data.batch_size, config.trainer.seed
    many = len(config.tasks) > 1  # the batches of one task are those of a run without `tasks`
    shares = {task.name: task.share for task in config.tasks if many and task.name in train}
    order: dict[str, Any] = {"seed": seed, "shuffle": config.data.shuffle, "pools": config.data.pools}
    size = 1 if shares or data.shares else batch_size
    sources: dict[str, PromptLoader | OfflineDatasetLoader] = {
        name: PromptLoader(rows, size, task=name, **order) if isinstance(rows, PromptDataset) else rows
        for name, rows in train.items()
    }
    if shares:
        return TaskLoader(sources, shares, batch_size=batch_size, seed=seed), unseen, notes
    if data.shares:
        return MixedLoader(sources, data.shares, batch_size=batch_size, seed=seed), unseen, notes
    (source,) = sources.values()
    source.end = None if epochs is None else epochs * data.rows
    return source, unseen, notes


def _unseen(held_out: Data, train: Mapping[str, Data], notes: list[str]) -> PromptDataset | Batch:
    """The held-out rows whose prompt does not occur in training."""
    recorded = [data for data in train.values() if not isinstance(data, PromptDataset)]
    if isinstance(held_out, PromptDataset):
        prompts = [data for data in train.values() if isinstance(data, PromptDataset)]
        held_out, overlap = check_disjoint(prompts, held_out)
        if overlap:
            notes.append(f"{overlap} held-out prompts occur in training and were left out")
    rows = held_out.batch
    seen = {tuple(prompt) for of in recorded for prompt in of.batch["prompt_tokens"]}
    keep = [tuple(prompt) not in seen for prompt in rows["prompt_tokens"]]
    if not any(keep):
        raise DataError("all held-out prompts occur in training (data.train): give other data.eval")
    if not all(keep):
        notes.append(f"{keep.count(False)} held-out rows have a prompt of the training data and were left out")
        rows = rows.filter(keep)
    return PromptDataset(rows, held_out.name) if isinstance(held_out, PromptDataset) else rows


def _train_by_task(config: Config, algorithms: Mapping[str, BaseAlgorithm]) -> dict[str, Data]:
    source, offline = config.data.train, [name for name, of in algorithms.items() if is_offline(config, of)]
    train: dict[str, Data] = {}
    if is_by_task(source):
        for name, part in by_task(source, [*algorithms]).items():
            train[name] = _recorded(config, part, f"train.{name}") if name in offline else prompts_of(config, part)
    else:
        if offline:
            raise ConfigError(
                f"task '{offline[0]}' learns from recorded responses, which have other columns than prompts: give each "
                f"task its data, data.train: {{{offline[0]}: FILE, ...}}"
            )
        prompts = prompts_of(config, source)
        parts = by_task(prompts.batch, [*algorithms])
        train = {name: PromptDataset(rows, f"{prompts.name}, task {name}") for name, rows in parts.items()}
    if missing := [task.name for task in config.tasks if task.share and task.name not in train]:
        raise DataError(f"data.train has nothing for task '{missing[0]}': add rows of it, or give it a share of 0")
    return train


def _held_out_by_task(config: Config, algorithms: Mapping[str, BaseAlgorithm]) -> PromptDataset | None:
    source = config.data.eval
    if source is None:
        return None
    if is_by_task(source):
        parts = {name: prompts_of(config, part).batch for name, part in by_task(source, [*algorithms]).items()}
        rows = Batch.concat(part.drop([COLUMN]).add({COLUMN: [name] * len(part)}) for name, part in parts.items())
        held_out = PromptDataset(rows, "data.eval")
    else:
        held_out = prompts_of(config, source)
    for name in by_task(held_out.batch, [*algorithms]):
        if next(task.reward_model for task in config.tasks if task.name == name) is None:
            raise ConfigError(f"data.eval has rows of task '{name}', which has no reward to score them: leave them out")
    return held_out


def prompts_of(config: Config, source: Any, limit: int | None = None) -> PromptDataset:
    """The prompts of a source, read as the settings say; with `limit` the first ones."""
    options = {name: getattr(config.data, name) for name in _OF_PROMPTS}
    return load_prompts(source, template=config.data.prompt_template, limit=limit, **options)


def _recorded(config: Config, source: Any, key: str) -> OfflineDatasetLoader:
    data = config.data
    file = _file(source)
    if file is None:
        raise ConfigError(f"data.{key} must be a JSONL or Parquet file of recorded responses")
    options = {name: getattr(data, name) for name in _OF_RECORDED}
    return OfflineDatasetLoader(file, seed=config.trainer.seed, chat=bool(data.chat), **options)


def _file(source: Any) -> str | None:
    """The file that a source names, if it names one and nothing else."""
    if isinstance(source, dict):
        return source["path"] if list(source) == ["path"] else None
    return source  # type: ignore[no-any-return]


def _tokenized(config: Config, data: Data, actor: Actor, split: str, notes: list[str]) -> Data:
    """The data with token columns; rows that are too long are noted."""
    # The longest sequence the model takes; without bound where it states none.
    most = getattr(actor.modules.config.get_text_config(), "max_position_embeddings", None) or 2**31
    limit = min(config.data.max_prompt_length or 2**31, most - 1)  # one position is left for a response at least
    if isinstance(data, PromptDataset):
        tokens, counts = tokenize_prompts(
            data, actor.tokenizer, max_prompt_length=limit, truncation=config.data.truncation, tools=actor.tools
        )
        notes += [f"{counts[what]} prompts of {data.name} are longer than {limit} tokens and were {what}"
                  for what in ("dropped", "truncated") if counts[what]]  # fmt: skip
        return tokens
    data.max_prompt_length = limit
    data.tokenize(actor.tokenizer)
    lengths = (data.batch.lengths(name) for name in ("prompt_tokens", "response_tokens"))
    longest = max(map(sum, zip(*lengths, strict=True)))
    if longest > most:
        raise DataError(
            f"data.{split} has a row of {longest} tokens and the model takes {most}: set data.max_response_length, or "
            "data.max_prompt_length with data.truncation"
        )
    prompt = "prompts longer than data.max_prompt_length or what the model takes"
    what_became = {
        "dropped": f"{prompt}: their groups were dropped",
        "truncated": f"{prompt}, which were truncated",
        "responses_truncated": "responses longer than data.max_response_length, which lost their end",
    }
    counts = data.counts
    notes += [f"{counts[what]} rows of data.{split} have {fate}" for what, fate in what_became.items() if counts[what]]
    return data
