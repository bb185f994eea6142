"""`verl generate`: prompts from a file in, completions into a file; cut off anywhere, the same command goes on.

While the work goes on, `OUT.part` lies beside the output `OUT`: a line with the settings, then one for each response as
it finishes. When all are there `OUT` is written in the order of the prompts, and takes its place in one piece. An
earlier `OUT` stays until then.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl.durable import append_lines, replace_file, try_lock
from verl.errors import ConfigError, DataError, RolloutError

if TYPE_CHECKING:
    from verl.batch import Batch
    from verl.rollout.base import Request, RolloutEngine

# Full batches of requests that the engine is given ahead, so that it never runs dry.
_AHEAD = 4
# Seconds between two lines of progress.
_SHOW_EVERY = 10.0


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub name.", show_default=False)],
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            help="JSONL, JSON or Parquet, a directory of them, .txt with a prompt a line, or - (lines from stdin).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output, .jsonl or .parquet.", show_default=False)],
    n: Annotated[int, typer.Option("-n", min=1, help="Responses to each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens only (0: off).")] = 0,
    top_p: Annotated[float, typer.Option(help="Within this probability mass only (1: off).")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest (0: off).")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a response; may be repeated.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--plain", help="Put plain prompts in the chat template.")] = None,
    system: Annotated[str | None, typer.Option(help="System message that starts each chat.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column of the prompt (else found by itself).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first prompts only.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes the samples.")] = 0,
    engine: Annotated[
        str, typer.Option(help="auto (vllm on a GPU, where it is installed), embedded, hf, vllm or FILE.py:CLASS.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences generated at the same time.")] = 256,
    kv_cache_gb: Annotated[float | None, typer.Option(help="Memory for keys and values, in GB.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; OUT is replaced at the end.")] = False,
) -> None:
    """Generate responses to the prompts of a file.

    If it was interrupted, the same command (without --fresh) continues; other prompts or settings are refused.

    A row of the output holds the prompt's columns and `id`, `response`, `finish` (stop, length; refused, with the
    reason in `error`), `response_tokens`. In .jsonl dates are ISO text and bytes base64.

    [bold]Examples[/bold]
    $ verl generate models/SmolLM2-135M-Instruct prompts.jsonl answers.jsonl --chat --temperature 0
    $ verl generate models/SmolLM2-135M-Instruct problems.parquet samples.parquet -n 8 --max-new-tokens 512
    $ echo 'Once upon a time' | verl generate models/SmolLM2-135M-Instruct - story.jsonl
    """
    from verl.data.prompts import load_prompts
    from verl.device import default_kind
    from verl.kernels.library_memory import limit_library_memory
    from verl.rollout.base import Request, SamplingParams
    from verl.rollout.choice import choose_engine
    from verl.rollout.options import RolloutOptions, SamplerOptions

    if system is not None and chat is False:
        raise ConfigError("--system starts a chat and --plain makes none: leave one of them out")
    limit_library_memory()
    if engine == "auto":
        known = "bfloat16" if dtype == "auto" else dtype
        engine = choose_engine(RolloutOptions(), default_kind(), dtype=known).name
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
    )
    _keep_apart(prompts, out)
    form: dict[str, Any] = {"prompt_column": prompt_column, "system_prompt": system, "chat": chat}
    data = load_prompts(_source(prompts), **form, limit=limit)
    # A link such as runs/latest may lead to another model the next time.
    given = {"model": os.path.realpath(model) if os.path.isdir(model) else model, "prompts": data.fingerprint(), **form}
    given |= {"n": n, "seed": seed, "dtype": dtype, "engine": engine, **asdict(params)}
    rows = {f"{row}/{sample}": row for row in range(len(data)) for sample in range(n)}
    with closing(_Output(out, json.loads(json.dumps(given)), fresh)) as output:
        if missing := [name for name in rows if name not in output.answers]:
            options = SamplerOptions(name=engine, max_num_seqs=max_num_seqs, kv_cache_gb=kv_cache_gb, seed=seed)
            writer = _Writer(model, dtype, options)
            tokens = writer.encode(data.batch)
            requests = (Request(name, tokens[rows[name]], params) for name in missing)
            for answer in _shown(writer.answers(requests), len(rows), len(rows) - len(missing)):
                output.add(answer)
        output.publish(rows, data.batch)
    _tell(out, rows, output.answers)
    typer.echo(out)


def _is_file(path: Path) -> bool:
    """Whether it is what the output may replace: neither a device, nor a link to one."""
    return path.is_file() and not path.is_symlink()


def _keep_apart(prompts: str, out: Path) -> None:
    """The output may neither take the prompts' place nor be read among them the next time."""
    if prompts != "-" and out.resolve().is_relative_to(Path(prompts).resolve()):
        raise ConfigError(f"{out} lies where the prompts are read from ({prompts}): give another name")


def _source(prompts: str) -> Any:
    if prompts != "-" and not prompts.endswith(".txt"):
        return prompts
    name = "standard input" if prompts == "-" else prompts
    if prompts != "-" and Path(prompts).exists() and not Path(prompts).is_file():
        raise DataError(f"{prompts} cannot be read: it is not a regular file (a pipe is given as -)")
    try:
        content = sys.stdin.buffer.read() if prompts == "-" else Path(prompts).read_bytes()
        # A prompt may hold what Unicode takes for the end of a line: `splitlines` would cut there.
        lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} cannot be read: {error}") from error
    if not lines:
        raise DataError(f"no prompts came: {name} has no lines")
    return lines


def _tell(out: Path, rows: Mapping[str, int], answers: Mapping[str, Mapping[str, Any]]) -> None:
    """The last line.

    Raises:
        RolloutError: every prompt was refused.
    """
    refused = {row: answers[name]["error"] for name, row in rows.items() if answers[name]["finish"] == "refused"}
    there, prompts = sum(row not in refused for row in rows.values()), len(set(rows.values()))
    note = f"; {len(refused)} of {prompts} prompts refused, see `error` in the output" if refused else ""
    typer.echo(f"{there} of {len(rows)} responses are there{note}", err=True)
    if not there:
        raise RolloutError(f"{out}: every prompt was refused, the first because {next(iter(refused.values()))}")


class _Writer:
    """A model and its engine, made only if a response is missing."""

    def __init__(self, model: str, dtype: str, options: Any) -> None:
        from verl.data.text import ResponseText
        from verl.device import put
        from verl.models.loading import eos_token_ids, load_model, load_tokenizer
        from verl.models.packed import PackedModel
        from verl.models.shards import model_shards
        from verl.workers.actor import make_rollout_engine

        loaded = put(load_model(model, dtype=dtype))
        self.tokenizer = load_tokenizer(model)
        ends = eos_token_ids(loaded, self.tokenizer)
        self._decode = ResponseText(self.tokenizer, ends)
        self.engine: RolloutEngine = make_rollout_engine(PackedModel(loaded), self.tokenizer, ends, options)
        self.engine.load_shards(model_shards(loaded), 0)  # an engine with a copy of its own takes the weights so
        self._ahead = _AHEAD * options.max_num_seqs

    def encode(self, prompts: Batch) -> list[list[int]]:
        from verl.data.tokenize import encode_prompts

        return encode_prompts(self.tokenizer, prompts)

    def answers(self, requests: Iterator[Request]) -> Iterator[dict[str, Any]]:
        """A row for each request, as they finish."""
        waiting = True
        while waiting or self.engine.unfinished:
            while waiting and self.engine.unfinished < self._ahead:
                request = next(requests, None)
                waiting = request is not None
                if request is not None:
                    try:
                        self.engine.add(request)
                    except RolloutError as error:
                        yield _answer(request.id, None, "refused", [], str(error))
            for sample in self.engine.step():
                text = self._decode(sample.tokens) if sample.text is None else sample.text
                yield _answer(sample.id, text, sample.finish, sample.tokens, None)


def _answer(name: str, text: str | None, finish: str, tokens: list[int], error: str | None) -> dict[str, Any]:
    return {"id": name, "response": text, "finish": finish, "response_tokens": tokens, "error": error}


def _shown(answers: Iterable[dict[str, Any]], total: int, done: int) -> Iterator[dict[str, Any]]:
    """The answers as they come; prints progress every `_SHOW_EVERY` seconds, and the speed at the end."""
    start, tokens, shown = time.monotonic(), 0, time.monotonic()
    speed = ""
    for answer in answers:
        tokens, done = tokens + len(answer["response_tokens"]), done + 1
        now = time.monotonic()
        speed = f"{tokens:,} tokens, {tokens / max(now - start, 1e-9):,.0f} tokens/s"
        if now > shown + _SHOW_EVERY:
            shown = now
            typer.echo(f"{done} of {total} responses, {speed}", err=True)
        yield answer
    typer.echo(speed, err=True)


class _Output:
    """The output file, and the answers that an earlier attempt left in its part file.

    No file is changed before the first answer, so that a wrong model cannot destroy an earlier output.

    Raises:
        ConfigError: the file is there, or was begun with other settings, or is of another kind, or cannot be written.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], fresh: bool) -> None:
        if out.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"{out}: the output must be .jsonl or .parquet")
        self._out, self._part = out, out.with_name(f"{out.name}.part")
        self.answers: dict[str, dict[str, Any]] = {}
        self._settings, self._fresh, self._begun = settings, fresh, False
        if os.path.lexists(out) and not (_is_file(out) and (fresh or self._part.exists())):
            raise self._is_there()
        with _writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("a", buffering=1, encoding="utf-8")
        try:
            with _writing(out):
                if not try_lock(self._file):
                    raise ConfigError(f"{out} is being written by another process")
                self._go_on([] if fresh else self._whole_lines())
        except BaseException:
            self.close()
            raise

    def _is_there(self) -> ConfigError:
        return ConfigError(f"{self._out} is there: give another name{', or --fresh' if _is_file(self._out) else ''}")

    def _go_on(self, lines: list[dict[str, Any]]) -> None:
        self._begun = len(lines) > 1  # without an answer the settings may be others now
        # What was begun with --fresh goes on without: the output that it replaces is still there.
        if self._out.exists() and not (self._fresh or (self._begun and lines[0].get("fresh"))):
            raise self._is_there()
        if self._begun:
            self._check(lines[0])
            self.answers = {answer["id"]: answer for answer in lines[1:]}

    def add(self, answer: dict[str, Any]) -> None:
        with _writing(self._out):
            if not self._begun:
                os.truncate(self._part, 0)
                self._file.write(json.dumps({**self._settings, "fresh": self._fresh}) + "\n")
                self._begun = True
            self._file.write(json.dumps(answer) + "\n")
        self.answers[answer["id"]] = answer

    def close(self) -> None:
        """Release the lock on the output."""
        with _writing(self._out):
            self._file.close()

    def publish(self, order: Mapping[str, int], prompts: Batch) -> None:
        """Write the answers in this order, each behind its prompt's columns; the part file goes."""
        columns = list(prompts.rows())
        rows = [_merged(columns[row], self.answers[name]) for name, row in order.items()]
        scratch = self._out.with_name(f"{self._out.name}.new")
        with _writing(self._out):
            try:
                (_write_parquet if self._out.suffix == ".parquet" else _write_lines)(rows, scratch)
                replace_file(scratch, self._out)
            finally:  # half a file on a full disk would only take room
                scratch.unlink(missing_ok=True)
            self._part.unlink()

    def _whole_lines(self) -> list[dict[str, Any]]:
        """What was written before; a line that was cut off is cut away."""
        append_lines(self._part, "")
        try:
            lines = [json.loads(line) for line in self._part.read_bytes().splitlines()]
            for number, line in enumerate(lines):
                if not isinstance(line, dict) or (number and not line.keys() >= {"id", "finish", "error"}):
                    raise ValueError(f"line {number + 1} is none of this command's")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._part} is damaged ({error}): start anew with --fresh") from error
        return lines

    def _check(self, before: Mapping[str, Any]) -> None:
        now = self._settings.items()
        other = [f"{key}={before.get(key)} (now {value})" for key, value in now if before.get(key) != value]
        if other:
            raise ConfigError(
                f"{self._part} was begun with {', '.join(other)}: give the same settings to go on, or --fresh"
            )


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        later = "once it can be, the same command without --fresh goes on"
        raise ConfigError(f"{out} cannot be written: {error}; {later}") from error


def _write_lines(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=_as_text) + "\n" for row in rows)


def _write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: list[Any]) -> pa.Array:
        try:
            return pa.array([_without_empty(value) for value in values])
        except pa.ArrowException:  # chats whose contents are text here and parts there: no type of Parquet holds them
            texts = [json.dumps(value, ensure_ascii=False, default=_as_text) for value in values]
            return pa.array([None if value is None else text for value, text in zip(values, texts, strict=True)])

    pq.write_table(pa.table({name: column([row[name] for row in rows]) for name in rows[0]}), path)


def _without_empty(value: Any) -> Any:
    """Null for a mapping without keys, which Parquet has no form for."""
    if isinstance(value, Mapping):
        return {key: _without_empty(item) for key, item in value.items()} or None
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str:
    """What JSON has no form for: bytes as base64, dates as ISO, others as they print."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _merged(prompt: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt's columns, then the answer; columns of the prompt that have an answer's name step aside."""
    columns = {f"user.{key}" if key in answer else key: value for key, value in prompt.items()}
    if columns.get("messages") is not None:
        columns["messages"] = json.loads(columns["messages"])
    return {**columns, **answer}
