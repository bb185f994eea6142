"""A run is a directory, named by its run id (a name and a hash of the configuration).

    runs/
        latest -> grpo-tiny-1a2b3c4d
        grpo-tiny-1a2b3c4d/
            run.json              the version of this layout (`verl._base.schemas`)
            config.yaml, metrics.jsonl, eval.jsonl, summary.json
            code.json             digests of the user's files and of models', and what was edited between attempts
            logs/001.log          one for each attempt; logs/001.rank1.log of another rank
            completions/          step-N.parquet of an evaluation, train-N.parquet of what step N learned from
            checkpoints/, tensorboard/
        grpo-tiny-1a2b3c4d.1/     an earlier run of the same configuration, finished or set aside

The same command resumes an unfinished run, and starts a new one after a finished one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from verl._base.durable import clear_staging, digest, link_atomic, parse_json, read_json, remove, write_atomic
from verl._base.schemas import check_run_schema, write_run_schema
from verl.errors import CheckpointError, ConfigError
from verl.run.lock import RunLock

logger = logging.getLogger(__name__)

Status = Literal["new", "resumed", "anew"]
_COMPLETIONS = re.compile(r"(?:step|train)-(\d+)\.parquet")


@dataclass(frozen=True)
class _Code:
    """`code.json`: digests of the user's files by path, and each edit that was accepted."""

    files: dict[str, str]
    edits: list[dict[str, int | str]]


@dataclass
class Run(AbstractContextManager["Run"]):
    """An open run, locked for this process until `close`.

    status: "new"; "resumed": unfinished; or the earlier run was finished, or set aside by `fresh` ("anew").
    attempt: 1 for the first process that worked on it.
    lock: keeps other processes away.
    aside: where the run went that made room for this one; None: none did.
    latest: what the link `latest` pointed to before.
    """

    path: Path
    status: Status
    attempt: int
    lock: RunLock
    aside: Path | None = None
    latest: str | None = None

    def __post_init__(self) -> None:
        self.checkpoints, self.completions = self.path / "checkpoints", self.path / "completions"
        self.metrics, self.evals = self.path / "metrics.jsonl", self.path / "eval.jsonl"
        #: The log of this attempt.
        self.log = self.path / "logs" / f"{self.attempt:03d}.log"

    def rewind(self, step: int) -> None:
        """Remove what was recorded after `step`, the last committed one, so that no row is there twice, and the mark
        that the run is finished, since it goes on.

        Raises:
            CheckpointError: the disk does not take it.
        """
        with self._written():
            (self.path / "summary.json").unlink(missing_ok=True)
            for file in (self.metrics, self.evals):
                if file.exists():
                    rewind_jsonl(file, step)
            for file in self.completions.glob("*.parquet"):
                match = _COMPLETIONS.fullmatch(file.name)
                if match and int(match[1]) > step:
                    file.unlink()

    def note_evaluation(self, row: Mapping[str, Any]) -> None:
        """Add a row to `eval.jsonl`, in place of one of its step; a disk that does not take it is a warning."""
        step = row["step"]
        try:
            rewind_jsonl(self.evals, step - 1, row)
        except OSError as error:
            logger.warning("the evaluation of step %d was not written to %s: %s", step, self.evals, error)

    def note_environment(self, environment: Mapping[str, Any]) -> None:
        """Write `environment.json`; a disk that does not take it is a warning."""
        try:
            self._write("environment.json", environment)
        except CheckpointError as error:
            logger.warning("%s", error)

    def note_code(self, files: Mapping[str, str], folders: Sequence[str] = (), *, accept_edits: bool = False) -> None:
        """Write digests of the user's files and of models' into `code.json`, with all edits since the run began.

        Args:
            files: path -> SHA-256, see `train.inputs_of`. Files that earlier attempts had besides are looked at, too.
            folders: every file in them counts, also one that is added or removed.
            accept_edits: go on with files that have changed.

        Raises:
            ConfigError: one has changed, or `code.json` is damaged or was removed.
        """
        kept = self._kept_code(accept_edits)
        earlier = (path for path in kept.files.keys() - files.keys() if os.path.isfile(path))
        now = {path: digest(path) for path in earlier} | dict(files)
        edited = [path for path, sha in kept.files.items() if now.get(path, sha) != sha]
        # Files that only one attempt had count in folders that both read.
        read = {os.path.dirname(path) for path in kept.files.keys() & files.keys()}.intersection(folders)
        edited += [path for path in sorted(kept.files.keys() ^ files.keys()) if os.path.dirname(path) in read]
        if edited and not accept_edits:
            raise ConfigError(
                f"{', '.join(edited)} has changed since this run began, and steps before and after would be of other "
                "code: put it back, start anew (--fresh), or go on with it (--accept-edits), which is recorded"
            )
        for path in edited:
            logger.warning("%s has changed since the run began; this is recorded in code.json", path)
            edit: dict[str, int | str] = {"attempt": self.attempt, "file": path}
            kept.edits.append(edit | {"before": kept.files.get(path, ""), "after": now.get(path, "")})
        removed = {path for path in edited if path not in now}
        files = {path: sha for path, sha in (kept.files | now).items() if path not in removed}
        self._code = _Code(files, kept.edits)
        self._write("code.json", asdict(self._code))

    def note_late(self, files: Mapping[str, str]) -> None:
        """Add files that were imported after the start; a disk that does not take them is a warning."""
        if new := {path: sha for path, sha in files.items() if path not in self._code.files}:
            self._code = _Code(self._code.files | new, self._code.edits)
            try:
                self._write("code.json", asdict(self._code))
            except CheckpointError as error:
                logger.warning("%s", error)

    def _kept_code(self, accept_edits: bool) -> _Code:
        file = self.path / "code.json"
        try:
            if self.status == "resumed" and file.exists():
                return read_json(file, _Code)  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is damaged ({error}): put it back, or start anew (--fresh)") from error
        if self.status == "resumed" and any(self.checkpoints.iterdir()) and not accept_edits:
            raise ConfigError(
                f"{file} is not there any more, so that it is not known whether code has changed since this run began: "
                "put it back, start anew (--fresh), or go on as it is (--accept-edits)"
            )
        return _Code({}, [])

    def finish(self, summary: Mapping[str, Any], *, steps: int) -> None:
        """Write `summary.json` and mark the run as finished after `steps` steps.

        Raises:
            CheckpointError: the disk does not take it.
        """
        self._write("summary.json", {**summary, "state": "finished", "steps": steps})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        with self._written():
            write_atomic(self.path / name, json.dumps(content, indent=1) + "\n")

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.path
            raise CheckpointError(
                f"{where} cannot be written ({error.strerror or error}); what was trained is in the checkpoints: free "
                "space and run the same command again"
            ) from None

    def discard(self) -> None:
        """Take back what `open_run` made, for a run that cannot begin. One that was there already stays."""
        if self.status == "resumed":
            return
        link = self.path.parent / "latest"
        try:
            remove(self.path)
            if self.aside is not None:
                os.rename(self.aside, self.path)
            if self.latest is None:
                link.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", self.path, error)
        if self.latest is not None:
            link_atomic(link, self.latest)

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def open_run(
    output_dir: str | Path,
    run_id: str,
    *,
    config: str = "",
    total_steps: int | None = None,
    fresh: bool = False,
) -> Run:
    """Open, resume or start the run `run_id` and lock it.

    Args:
        config: text of `config.yaml`.
        total_steps: the length asked for; a run that finished before it is resumed.
        fresh: set an unfinished run aside too.

    Raises:
        ConfigError: another process works on the run, another version of verl wrote it in a form that is not read, or
            the directory cannot be made.
    """
    path = Path(output_dir).absolute() / run_id
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not fresh:
            check_run_schema(path)
        # Before anything is decided: another process may be about to finish the run, or to set it aside.
        lock = RunLock(path)
        status: Status = "new"
        aside, link = None, path.parent / "latest"
        latest = os.readlink(link) if link.is_symlink() else None
        if path.exists():
            status = "anew" if fresh or is_finished(path, total_steps) else "resumed"
        if status == "anew":
            names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            os.rename(path, aside)
        for folder in ("checkpoints", "completions", "logs"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        # In the run's own folders the lock says that nobody else writes; other runs' processes do in the one above.
        clear_staging(path.parent)
        for directory in (path, path / "completions", path / "checkpoints"):
            clear_staging(directory, alone=True)
        attempts = [int(file.stem) for file in (path / "logs").glob("*.log") if file.stem.isdigit()]
        run = Run(path, status, max(attempts, default=0) + 1, lock, aside, latest)
        write_run_schema(path)
        run.log.touch()
        if config:
            write_atomic(path / "config.yaml", config)
        link_atomic(link, path.name)
    except OSError as error:
        if lock is not None:
            lock.close()
        raise ConfigError(
            f"the run directory {path} cannot be used: {error.strerror or error}; set trainer.output_dir elsewhere"
        ) from error
    return run


def rewind_jsonl(file: Path, step: int, *rows: Mapping[str, Any]) -> None:
    """Keep the rows of a JSONL file up to `step` and append `rows`; a torn last line is removed, and whatever is no
    row with a step."""
    kept = []
    content = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    for line in content.splitlines():
        try:
            row_step = parse_json(line.encode(), dict[str, Any]).get("step")
        except ValueError:
            continue
        if isinstance(row_step, int) and row_step <= step:
            kept.append(line + "\n")
    write_atomic(file, "".join([*kept, *(json.dumps(row) + "\n" for row in rows)]))


def is_finished(path: Path, total_steps: int | None) -> bool:
    """Whether the run in a directory went to its end, which is `total_steps` or more."""
    try:
        summary: dict[str, Any] = read_json(path / "summary.json", dict[str, Any])
    except (OSError, ValueError):
        return False
    steps = summary.get("steps", total_steps)
    return summary.get("state") == "finished" and (
        total_steps is None or (isinstance(steps, int) and steps >= total_steps)
    )
