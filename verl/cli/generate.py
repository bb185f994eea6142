"""`verl generate`: prompts from a file in, completions into a file, which is written in one piece at the end."""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from verl._base.durable import clear_staging, write_atomic
from verl.errors import ConfigError, DataError, RolloutError

if TYPE_CHECKING:
    from verl.batch import Batch
    from verl.rollout.base import SamplingParams
    from verl.rollout.options import SamplerOptions


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
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace OUT, at the end, if it is there.")] = False,
) -> None:
    """Generate responses to the prompts of a file.

    OUT is written when all responses are there; an interrupted command leaves nothing.

    A row of the output holds the prompt's columns and `id`, `response`, `finish` (stop, length; refused, with the
    reason in `error`), `response_tokens`. In .jsonl dates are ISO text and bytes base64. In .parquet a column whose
    values have no one type (mappings of different keys, say) is JSON text, which a line on stderr says.

    [bold]Examples[/bold]
    $ verl generate models/SmolLM2-135M-Instruct prompts.jsonl answers.jsonl --chat --temperature 0
    $ verl generate models/SmolLM2-135M-Instruct problems.parquet samples.parquet -n 8 --max-new-tokens 512
    $ echo 'Once upon a time' | verl generate models/SmolLM2-135M-Instruct - story.jsonl
    """
    from verl._host.device import limit_library_memory
    from verl.data.prompts import load_prompts
    from verl.rollout.base import SamplingParams
    from verl.rollout.options import SamplerOptions

    if system is not None and chat is False:
        raise ConfigError("--system starts a chat and --plain makes none: leave one of them out")
    _check_output(out, prompts, fresh)
    limit_library_memory()
    ends = tuple(stop or ())
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, stop=ends
    )
    form: dict[str, Any] = {"prompt_column": prompt_column, "system_prompt": system, "chat": chat}
    data = load_prompts(_source(prompts), **form, limit=limit)
    rows = {f"{row}/{sample}": row for row in range(len(data)) for sample in range(n)}
    options = SamplerOptions(name=engine, max_num_seqs=max_num_seqs, kv_cache_gb=kv_cache_gb, seed=seed)
    answers = _answers(model, dtype, options, data.batch, rows, params)
    try:
        write_atomic(out, _content(out.suffix, data.batch.take([*rows.values()]), answers))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    _tell(out, rows.values(), answers)
    typer.echo(out)


class _Answer(NamedTuple):
    """A response, or the reason for its refusal (`error`). Columns of the output."""

    id: str
    response: str | None
    finish: str
    response_tokens: list[int]
    error: str | None = None


def _check_output(out: Path, prompts: str, fresh: bool) -> None:
    """The output may neither take the prompts' place nor be read among them the next time; what is there stays, unless
    `fresh`. What cannot be written is reported before anything is generated.

    Raises:
        ConfigError: one of these.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out}: the output must be .jsonl or .parquet")
    if prompts != "-" and out.resolve().is_relative_to(Path(prompts).resolve()):
        raise ConfigError(f"{out} lies where the prompts are read from ({prompts}): give another name")
    can_replace = out.is_file() and not out.is_symlink()  # neither a device, nor a link to one
    if os.path.lexists(out) and not (can_replace and fresh):
        raise ConfigError(f"{out} is there: give another name{', or --fresh' if can_replace else ''}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        clear_staging(out.parent)  # of a process that was killed while it wrote the output
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


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


def _tell(out: Path, rows: Iterable[int], answers: Sequence[_Answer]) -> None:
    """The last line.

    Raises:
        RolloutError: every prompt was refused.
    """
    prompts = {row: answer.error for row, answer in zip(rows, answers, strict=True)}  # all its samples, or none
    refused = [error for error in prompts.values() if error is not None]
    there = sum(answer.error is None for answer in answers)
    note = f"; {len(refused)} of {len(prompts)} prompts refused, see `error` in the output" if refused else ""
    typer.echo(f"{there} of {len(answers)} responses are there{note}", err=True)
    if not there:
        raise RolloutError(f"{out}: every prompt was refused, the first because {refused[0]}")


def _answers(
    model: str, dtype: str, options: SamplerOptions, prompts: Batch, rows: Mapping[str, int], params: SamplingParams
) -> list[_Answer]:
    """Responses in the order of `rows`, by the names of which each has the row of its prompt. Progress is printed every
    ten seconds, and the speed at the end."""
    from verl._host.device import default_kind, put
    from verl.data.text import ResponseText
    from verl.data.tokenize import encode_prompts
    from verl.models.loading import eos_token_ids, load_model, load_tokenizer
    from verl.models.packed import PackedModel
    from verl.roles.settings import with_engine
    from verl.rollout.base import Request
    from verl.weights.shards import model_shards
    from verl.workers.actor import make_rollout_engine

    loaded, tokenizer = put(load_model(model, dtype=dtype)), load_tokenizer(model)
    ends = eos_token_ids(loaded, tokenizer)
    decode = ResponseText(tokenizer, ends)
    engine = make_rollout_engine(PackedModel(loaded), tokenizer, ends, with_engine(options, loaded, default_kind()))
    engine.load_shards(model_shards(loaded), 0)  # an engine with a copy of its own takes the weights so
    tokens, waiting, answers = encode_prompts(tokenizer, prompts), deque(rows), dict[str, _Answer]()
    begin, shown, written, speed = time.monotonic(), time.monotonic(), 0, ""
    while waiting or engine.unfinished:
        # Four batches ahead, so that the engine always has a full one; not all, since each has its tokens in memory.
        while waiting and engine.unfinished < 4 * options.max_num_seqs:
            name = waiting.popleft()
            try:
                engine.add(Request(name, tokens[rows[name]], params))
            except RolloutError as error:
                answers[name] = _Answer(name, None, "refused", [], str(error))
        for sample in engine.step():
            text = decode(sample.tokens) if sample.text is None else sample.text
            answers[sample.id] = _Answer(sample.id, text, sample.finish, sample.tokens)
            written += len(sample.tokens)
        now = time.monotonic()
        speed = f"{written:,} tokens, {written / max(now - begin, 1e-9):,.0f} tokens/s"
        if now > shown + 10:
            shown = now
            typer.echo(f"{len(answers)} of {len(rows)} responses, {speed}", err=True)
    typer.echo(speed, err=True)
    return [answers[name] for name in rows]


def _content(suffix: str, prompts: Batch, answers: Sequence[_Answer]) -> bytes:
    """The output: columns of the prompts, then of their answers. One of the prompts that has an answer's name steps
    aside."""
    from verl.batch import Batch

    columns = dict(zip(_Answer._fields, map(list, zip(*answers, strict=True)), strict=True))
    names = [f"user.{name}" if name in columns else name for name in prompts.columns]
    batch = Batch(prompts.table.rename_columns(names)).add(columns)
    if suffix == ".parquet":
        return _parquet(batch)
    rows = ({**row, "messages": json.loads(row["messages"])} if row.get("messages") else row for row in batch)
    return "".join(json.dumps(row, ensure_ascii=False, default=_as_text) + "\n" for row in rows).encode()


def _parquet(batch: Batch) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl._base.exact import ExactType

    table, sink = batch.table, BytesIO()
    as_json = [field.name for field in table.schema if isinstance(field.type, ExactType)]
    if "messages" in batch:
        as_json.append("messages")
        chats = [text and json.loads(text) for text in batch["messages"]]
        # Parquet has no type for contents that are text here and parts there, or a mapping without keys: JSON it stays.
        with suppress(pa.ArrowException):
            lists = table.set_column(batch.columns.index("messages"), "messages", pa.array(chats))
            pq.ParquetWriter(BytesIO(), lists.schema).close()
            table = lists
            as_json.remove("messages")
    if as_json:
        typer.echo(f"JSON text, since no type of Parquet holds all its values: {', '.join(as_json)}", err=True)
    pq.write_table(table, sink)
    return sink.getvalue()


def _as_text(value: Any) -> str:
    """What JSON has no form for: bytes as base64, dates as ISO, others as they print."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(getattr(value, "isoformat", value.__str__)())
