"""`verl chat`: talk to a model; the reply appears as it is written."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer

from verl.errors import RolloutError

if TYPE_CHECKING:
    from verl.rollout.base import Sample, SamplingParams, Verdict


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub name.", show_default=False)],
    system: Annotated[str | None, typer.Option(help="System message that starts the chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Within this probability mass only (1: off).")] = 0.95,
    seed: Annotated[int, typer.Option(help="Fixes the replies.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Talk to a model: a line is a message, /new starts over, end of input ends it; Ctrl-C cuts a reply short.

    A model without a chat template goes on writing each line.

    [bold]Examples[/bold]
    $ verl chat models/SmolLM2-135M-Instruct
    $ verl chat runs/latest/model --system 'Answer in one word.' --temperature 0
    $ echo 'What is the capital of France?' | verl chat models/SmolLM2-135M-Instruct
    """
    from verl.rollout.base import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    talk = _Talk(model, dtype, params, seed, system)
    asking = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text must not end the chat
    while True:
        try:
            line = input("> " if asking else "")
        except EOFError:
            return
        if line.strip() == "/new":
            talk.start_over()
        elif line.strip():
            try:
                talk.reply(line)
            except RolloutError as error:
                typer.secho(f"{error} (/new starts over)", fg="red", err=True)


class _Talk:
    """The messages so far, and the engine that answers them."""

    def __init__(self, model: str, dtype: str, params: SamplingParams, seed: int, system: str | None) -> None:
        from verl.device import put
        from verl.models.loading import eos_token_ids, load_model, load_tokenizer
        from verl.models.packed import PackedModel
        from verl.workers.actor import RolloutOptions, make_rollout_engine

        loaded = put(load_model(model, dtype=dtype))
        self._tokenizer = load_tokenizer(model)
        self._engine = make_rollout_engine(
            PackedModel(loaded),
            self._tokenizer,
            eos_token_ids(loaded, self._tokenizer),
            RolloutOptions(max_num_seqs=1, seed=seed),
        )
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._asked = 0
        self.start_over()

    def start_over(self) -> None:
        self._messages: list[dict[str, str]] = list(self._first)

    def reply(self, line: str) -> None:
        """Write the reply to standard output while it comes.

        Raises:
            RolloutError: the chat has grown too long; it is then as before.
        """
        from verl.rollout.base import Request

        messages = [*self._messages, {"role": "user", "content": line}]
        self._asked += 1
        printer = _Printer()
        with _ctrl_c() as cut:
            self._engine.add(Request(str(self._asked), self._encode(messages), self._params, guard=printer))
            sample = self._finished(str(self._asked), cut)
            printer([sample.text or ""])
        typer.echo()
        self._messages = [*messages, {"role": "assistant", "content": sample.text or ""}]

    def _finished(self, name: str, cut: list[int]) -> Sample:
        while self._engine.unfinished:
            if samples := self._engine.step():
                return samples[0]
            if cut:
                self._engine.abort([name])
        raise RolloutError("the engine has lost the reply")

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        from verl.data.tokenize import render

        if getattr(self._tokenizer, "chat_template", None):
            text: str = render(self._tokenizer, messages)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self._tokenizer("".join(message["content"] for message in messages))["input_ids"])


@contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """A list that Ctrl-C adds to. Its exception, which may come anywhere in a step, would lose the reply or leave
    the engine in two minds."""
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


class _Printer:
    """A guard that lets everything pass and prints what is new of it."""

    every = 1

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, texts: Sequence[str]) -> list[Verdict]:
        for text in texts:
            sys.stdout.write(text[self._shown :])
            sys.stdout.flush()
            self._shown = len(text)
        return [None] * len(texts)
