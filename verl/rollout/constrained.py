"""Constraints on responses: a grammar per token, a guard on the partial text, a check at the end."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from verl._base.checked import checked
from verl._base.record import Natural
from verl.errors import ConfigError
from verl.rollout.base import Guard, Verdict
from verl.rollout.episode import DEADLINE, Client, Row
from verl.rollout.grammar import Grammar
from verl.rollout.turns import Turns


@dataclass(eq=False)
class ScoreGuard:
    """A guard with a threshold: a text that scores below `minimum` gets the verdict.

    Args:
        score: a function from texts to numbers, such as
            `lambda texts: reward_model.scores(texts, [""] * len(texts))`.
        minimum: the lowest score that passes.
        every: tokens between two checks; a response that has ended is checked, too.
        verdict: "reject" discards the response, "stop" ends it as it is.
    """

    score: Callable[[list[str]], Sequence[float]]
    minimum: float
    _: KW_ONLY
    every: int = 16
    verdict: Verdict = "reject"

    def __call__(self, texts: Sequence[str]) -> list[Verdict]:
        # NaN does not pass.
        return [None if score >= self.minimum else self.verdict for score in self.score(list(texts))]


@checked
@dataclass(eq=False, kw_only=True)
class ConstrainedEpisode:
    """A single turn under constraints; a response that violates one is discarded and another one is sampled.

    With a grammar, a response that the token limit, a stop string or a guard cuts off is a violation, too. If all of
    `1 + max_resamples` responses fail, the last one is kept with `finish="reject"`: it is not scored, and abstains. The
    metric is `rollout/rejection_rate`.

    Args:
        grammar: of every response, or a function from a row to its grammar (or None).
        guard: checks the partial text; see `Guard`, `ScoreGuard`.
        accept: a function, plain or async, from the text of a finished response and its row to whether it is accepted.
        max_resamples: further tries after a rejected response.
        deadline: seconds for an episode.

    Raises:
        ConfigError: there is no constraint, or `max_resamples` is negative.
    """

    grammar: Grammar | Callable[[Row], Grammar | None] | None = None
    guard: Guard | None = None
    accept: Callable[[str, Row], bool | Awaitable[bool]] | None = None
    max_resamples: Natural = 3
    deadline: float = DEADLINE

    def __post_init__(self) -> None:
        if self.grammar is None and self.guard is None and self.accept is None:
            raise ConfigError("a constrained episode needs a grammar, a guard or accept")
        #: Whether samples do not follow the model's distribution; the trainer warns of it.
        self.masks = self.grammar is not None

    async def __call__(self, client: Client, row: Row) -> list[Turns]:
        assert client.text is not None
        grammar = self.grammar(row) if callable(self.grammar) else self.grammar
        for rejected in range(self.max_resamples + 1):
            sample = await client.generate(row["prompt_tokens"], grammar=grammar, guard=self.guard)
            turns = Turns(rejected=rejected).wrote(sample)
            holds = sample.finish == "stop" or (sample.finish == "length" and grammar is None)
            if holds and self.accept is not None:
                accepted = self.accept(client.text(sample.tokens), row)
                holds = bool(await accepted if inspect.isawaitable(accepted) else accepted)
            if holds:
                return [turns]
        turns.finish = "reject"
        return [turns]
