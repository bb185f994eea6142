"""Rewards that servers compute: a scoring service of your own, and a language model as a judge.

A call that fails, is late or gets an invalid answer is retried, on another server if there is one (`ServerPool`); if
all tries fail, its samples abstain.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from verl._base.checked import checked
from verl._base.record import AsTuple, Count, NotNegative, Retries, Seconds
from verl._host.http_servers import ServerPool, check_model_path
from verl._host.user_calls import UserCode
from verl._host.user_code import describe, traceback_of
from verl.data.prompts import content_text
from verl.data.text import behind_thoughts
from verl.errors import ConfigError, RewardError, RolloutError, nearest
from verl.rewards.calls import ASYNC_CALLS
from verl.rewards.functions import FunctionReward
from verl.rewards.scores import Score, failure, read_score, read_scores
from verl.rewards.signatures import user_columns

logger = logging.getLogger(__name__)

TEMPLATE = """Grade the response to the prompt.

[Prompt]
{prompt}

[Response]
{response}

Say in a sentence what is right or wrong with it. End with a line "Score: N", N from 0 (useless) to 10 (perfect)."""
#: At the beginning of a line, as the template asks, and once in it: elsewhere it may be a quotation of the response.
#: "Score: 7", "**Score** (0-10): 1.5", '{"score": .5', "Final score: 7/10", "Score: 7 out of 10"; not "Score: 0-10".
#: The second group is what the number is out of.
SCORE = (
    r"(?im)^[ \t*_#`{-]*(?:(?:the|my|final|overall|total)[ _])*(?:\"(?=score\"))?"
    r"score(?!.*score[\s:=*_\"'`]+[-+\u2212]?\.?\d)(?:\s*\([^)\n]{0,40}\))?[\s:=*_\"'`]{0,6}"
    r"([-+\u2212]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?![\w%]|[.,]\d|\s*[-\u2013]\s*\d|\s*%)"
    r"(?:[\s*_\"'`]{0,6}(?:/|out\s+of|of)[\s*_\"'`]{0,6}(\d+(?:\.\d+)?))?"
)
#: Of the template above.
SCALE = (0.0, 10.0)
#: Full-width letters, digits and signs, as judges of East Asian languages write them.
_FULL_WIDTH = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}


class ServedReward(FunctionReward):
    """Scores samples by calls to servers, up to 64 at a time."""

    judges = "response"

    @checked
    def __init__(
        self,
        function: Callable[..., Any],
        servers: str | Sequence[str],
        api_key: str | None,
        *,
        name: str,
        timeout: Seconds = 60.0,
        retries: Retries = 3,
        **options: Any,
    ) -> None:
        if options.pop("workers", None):
            kind = type(self).__name__
            raise ConfigError(f"{kind}: its calls wait for servers, up to {ASYNC_CALLS} at a time: leave workers out")
        kind = f"'{name}' server"
        self.pool = ServerPool(servers, timeout=timeout, retries=retries, api_key=api_key, kind=kind)
        super().__init__(function, name=name, **{**options, "process": False})
        self.timeout = math.inf  # each call has its own deadline

    async def _ask(self, rows: int, call: Coroutine[Any, Any, list[Score]]) -> list[Score]:
        """The scores of a call; one that fails fails for all of its samples."""
        try:
            return await asyncio.wrap_future(self.pool.submit(call))
        except RolloutError as error:
            return [failure(str(error))] * rows


class RemoteReward(ServedReward):
    """A scoring service. It gets {"prompts": [...], "responses": [...], "columns": {name: [...]}} by POST and answers
    with a list of results, or {"rewards": [...]} or {"scores": [...]}; a result is what a reward function may return
    for one sample.

    Args:
        source: its address, or a list of them.
        batch_size: samples in one call.
        timeout: seconds for one call.
        retries: further tries of a call that failed.
        api_key: sent as a bearer token; "$NAME" is in that variable of the environment.
        name, **options: see `FunctionReward`.
    """

    @checked
    def __init__(
        self,
        source: str | Sequence[str],
        *,
        batch_size: Count = 32,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(self.scores, source, api_key, **{"name": "remote", "batch_size": batch_size, **options})
        self._is_by_group = True  # no call has samples of several prompts

    async def scores(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[Score]:
        """A score for each sample of one call."""
        for column, values in columns.items():
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RewardError(f"column '{column}' cannot be sent as JSON: {error}") from None
        body = {"prompts": prompts, "responses": [*map(_text, completions)], "columns": columns}
        rows = len(prompts)
        return await self._ask(rows, self.pool.ask({self.pool.path: body}, partial(_results, rows)))


class JudgeReward(ServedReward):
    """A language model that grades: its prompt is made from a template, its score is parsed from its reply.

    Args:
        source: an OpenAI-style server ("http://host:8000"), a text server (".../generate", which gets {"prompt": ...}
            and answers with {"text": ...}; without that path, as in today's vLLM, it gets chat completions), or a list.
        template: the judge's prompt; {prompt}, {response} and names of the data's columns are filled in.
        parse: a regular expression, whose last match's first group is the number, and its second, if it has one, the
            most that it could be. By default a line that begins with "Score: N"; of two such lines that differ one may
            be quoted from the response, so the sample abstains. Or a function from the reply to a number, None (the
            sample abstains), or anything else that a reward function may return.
        scale: the least and the most that the judge may give. A sample with any other number abstains, and so does one
            whose number is out of another most ("4/5" on a scale to 10).
        system: a system message.
        model: the judge's name on the server; None: the first model that it lists.
        max_tokens, temperature: of the reply.
        timeout, retries, api_key: as of `RemoteReward`.
        name, **options: see `FunctionReward`.

    Raises:
        ConfigError: the template has no {response}, `parse` has no group, `scale` is not two numbers of which the first
            is lower, or an address cannot be a model server's.
    """

    @checked
    def __init__(
        self,
        source: str | Sequence[str],
        *,
        template: str = TEMPLATE,
        parse: str | Callable[[str], Any] = SCORE,
        scale: Annotated[tuple[float, float], AsTuple] = SCALE,
        system: str | None = None,
        model: str | None = None,
        max_tokens: Count = 256,
        temperature: NotNegative = 0.0,
        api_key: str | None = None,
        name: str = "judge",
        **options: Any,
    ) -> None:
        if "{response}" not in template:
            raise ConfigError(f"reward '{name}': the judge's template must contain {{response}}")
        try:
            is_parser = callable(parse) or re.compile(parse).groups > 0
        except re.error:
            is_parser = False
        if not is_parser:
            raise ConfigError(
                f"reward '{name}': '{parse}' has to be a regular expression with a group (...) around the number"
            )
        if scale[0] >= scale[1]:
            raise ConfigError(f"JudgeReward.scale: is the least and the most of a judge's score, not {scale}")
        self.scale = scale
        for url in [source] if isinstance(source, str) else source:
            check_model_path(url)
        self.template, self.parse, self.system, self.model = template, parse, system, model
        self.sampling = {"max_tokens": max_tokens, "temperature": temperature}
        super().__init__(self.scores, source, api_key, name=name, batch_size=1, **options)
        self._code = UserCode(f"reward {self.name}")

    def check_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        super().check_data(rows)
        known = {"prompt", "response", *user_columns(dict(rows[0]))}
        for name in sorted({*re.findall(r"\{(\w+)\}", self.template)} - known):
            text = f"the template's {{{name}}} is no column of the data and stays as it is: {nearest(name, known)}"
            logger.warning("reward '%s': %s", self.name, text)

    async def scores(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[Score]:
        """The score of one sample."""
        sample = {name: values[0] for name, values in columns.items()}
        sample |= {"prompt": _text(prompts[0]), "response": _text(completions[0])}
        # Other words in braces stay.
        text = re.sub(r"\{(\w+)\}", lambda match: str(sample.get(match[1], match[0])), self.template)
        return await self._ask(1, self._judge(text))

    async def _judge(self, text: str) -> list[Score]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        chat = {"messages": [*system, {"role": "user", "content": text}], **self.sampling}
        bodies = {"/v1/chat/completions": chat}
        if self.pool.path.endswith("/generate"):  # today's vLLM does not have it; its chat needs no model's name
            bodies = {self.pool.path: {"prompt": text, "stream": False, **self.sampling}, **bodies}
        if model := self.model or (len(bodies) == 1 and await self.pool.model()):
            chat["model"] = model
        said = await self.pool.ask(bodies, lambda answer: _said(text, answer))
        try:
            return [await self._code.call(self.pool.timeout, self._parsed, said)]
        except Exception as error:  # the reply and the user's function may be wrong in any way
            return [
                failure(f"the judge's answer cannot be read ({describe(error)}): {said[-200:]!r}", traceback_of(error))
            ]

    def _parsed(self, said: str) -> Score:
        (low, high), end = self.scale, repr(said[-200:])
        if callable(self.parse):
            score = read_score(self.parse(said))
        else:
            reply = behind_thoughts(said).partition("<think>")[0].translate(_FULL_WIDTH)
            numbers = list(re.finditer(self.parse, reply))
            if not numbers or (self.parse == SCORE and len({number.groups() for number in numbers}) > 1):
                what = "several scores" if numbers else "no score (a line that begins with it, 'Score: N')"
                return failure(f"the judge gave {what}: {end}")
            number, most = (*numbers[-1].groups(default=""), "")[:2]
            if most and float(most) != high:
                return failure(f"the judge's score is out of {most}, the scale ends at {high:g}: {end}")
            score = read_score(float(number.replace("\u2212", "-")))
        if score.value is None or low <= score.value <= high:
            return score
        return failure(f"the judge's score {score.value:g} is not on the scale {low:g} to {high:g}: {end}")


def _results(rows: int, answer: Any) -> list[Score]:
    results = answer
    if isinstance(answer, dict):
        results = answer["rewards"] if "rewards" in answer else answer["scores"]
    if not isinstance(results, list) or len(results) != rows:
        raise ValueError(f"no list of {rows} results came")
    return read_scores(results, rows)


def _said(prompt: str, answer: Any) -> str:
    """A judge's reply, in either protocol.

    Raises:
        LookupError, TypeError: the answer has no reply.
    """
    said = answer["choices"][0]["message"]["content"] if "choices" in answer else answer["text"]
    if isinstance(said, list):
        said = said[0]
    if not isinstance(said, str):
        raise TypeError("the judge said nothing")
    return said.removeprefix(prompt)


def _text(content: Any) -> str:
    """A text as it is; a chat of one message as its content, a longer one with roles."""
    if not isinstance(content, list):
        return str(content or "")
    if len(content) == 1:
        return content_text(content[0])
    return "\n\n".join(f"{message['role']}: {content_text(message)}" for message in content)
