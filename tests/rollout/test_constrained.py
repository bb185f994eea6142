"""Grammars, guards and checks: what holds is kept, what does not is sampled anew, within a bound."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.constrained import ConstrainedEpisode, ScoreGuard
from verl.rollout.grammar import Grammar

DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUM = 'root ::= number (" + " number)* "=" number\nnumber ::= [0-9] | [1-9] [0-9]'
MakeActor = Callable[..., verl.Actor]


@pytest.fixture(params=["embedded", "hf"])
def make_actor(request: pytest.FixtureRequest, tiny: Path) -> MakeActor:
    def make(**options: Any) -> verl.Actor:
        options = {"sampling": SamplingParams(max_new_tokens=64), **options}
        return verl.Actor.from_pretrained(str(tiny), rollout=request.param, **options)

    return make


def is_date(text: str) -> bool:
    return re.fullmatch(DATE, text) is not None


def is_person(text: str) -> bool:
    person = json.loads(text)
    return person["name"] in ("ann", "bob") and 0 <= person["age"] <= 99 and len(person) == 2


def is_sum(text: str) -> bool:
    return re.fullmatch(r"\d\d?( \+ \d\d?)*=\d\d?", text) is not None


@pytest.mark.quick("embedded-json", "hf-regex", "embedded-ebnf")
@pytest.mark.parametrize(
    ("grammar", "holds"),
    [(Grammar.regex(DATE), is_date), (Grammar.json_schema(SCHEMA), is_person), (Grammar.ebnf(SUM), is_sum)],
    ids=["regex", "json", "ebnf"],
)
def test_what_is_finished_keeps_to_the_grammar(
    make_actor: MakeActor, grammar: Grammar, holds: Callable[[str], bool]
) -> None:
    actor = make_actor(episode=ConstrainedEpisode(grammar=grammar, max_resamples=0))
    rows = actor.generate_sequences(["A", "The", "x"], n=4)
    finished = [text for text, end in zip(rows["response"], rows["finish"], strict=True) if end == "stop"]
    assert len(finished) >= 6
    assert all(map(holds, finished)), finished
    # What the limit cuts off does not hold.
    assert set(rows["finish"]) <= {"stop", "reject"}
    # The log-probs are those of the model without the mask: what the trainer computes of the same tokens.
    again = actor.compute_log_probs(rows)["log_probs"]
    for engine, trainer in zip(rows["rollout_log_probs"], again, strict=True):
        assert engine == pytest.approx(trainer, abs=1e-4)


def test_what_is_cut_off_does_not_hold(make_actor: MakeActor) -> None:
    """By a guard or by a stop string, in the middle of what the grammar wants."""

    class Stop:
        every = 4

        def __call__(self, texts: list[str]) -> list[str]:
            return ["stop"] * len(texts)

    episode = ConstrainedEpisode(grammar=Grammar.regex(DATE), guard=Stop(), max_resamples=1)
    rows = make_actor(episode=episode).generate_sequences(["A", "B"], n=2)
    assert (set(rows["finish"]), rows.lengths("response_tokens")) == ({"reject"}, [4] * 4)
    episode = ConstrainedEpisode(grammar=Grammar.regex(DATE), max_resamples=1)
    sampling = SamplingParams(max_new_tokens=64, stop=("-",))
    rows = make_actor(episode=episode, sampling=sampling).generate_sequences(["A", "B"], n=2)
    assert (set(rows["finish"]), rows.lengths("response_tokens")) == ({"reject"}, [5] * 4)


def test_the_masked_policy_is_renormalised(tiny: Path) -> None:
    """Frequencies of the first token are the model's probabilities of the allowed ones, made to sum to one."""
    actor = verl.Actor.from_pretrained(str(tiny), sampling=SamplingParams(max_new_tokens=2))
    engine, tokenizer = actor.group.worker.rollout_engine, actor.tokenizer
    grammar = Grammar.regex("[abc]")
    prompt = tokenizer("Q")["input_ids"]
    requests = [Request(f"{i}", prompt, actor.sampling, grammar=grammar) for i in range(1000)]
    first = [sample.tokens[0] for sample in generate(engine, requests)]
    with torch.no_grad():
        allowed = [tokenizer.convert_tokens_to_ids(letter) for letter in "abc"]
        expected = actor.model(torch.tensor([prompt])).logits[0, -1, allowed].softmax(-1)
    assert set(first) == set(allowed)
    for token, share in zip(allowed, expected.tolist(), strict=True):
        assert abs(first.count(token) / 1000 - share) < 5 * math.sqrt(share * (1 - share) / 1000)


def test_rows_have_their_own_grammar_and_others_none(make_actor: MakeActor) -> None:
    def grammar(row: Mapping[str, Any]) -> Grammar | None:
        return Grammar.regex(row["form"]) if row["form"] else None

    free = make_actor().generate_sequences([{"prompt": "Q", "form": ""}], key="k")
    actor = make_actor(episode=ConstrainedEpisode(grammar=grammar))
    rows = actor.generate_sequences([{"prompt": "Q", "form": form} for form in ("", "a{3}", "(xy)+z")], key="k")
    assert rows["response_tokens"][0] == free["response_tokens"][0]
    assert rows["response"][1] == "aaa"
    assert rows["finish"][2] == "reject" or re.fullmatch("(xy)+z", rows["response"][2])


def test_a_check_at_the_end_resamples_within_its_bound(make_actor: MakeActor) -> None:
    seen: list[str] = []

    def even(text: str, row: Mapping[str, Any]) -> bool:
        seen.append(text)
        return int(text) % 2 == 0

    episode = ConstrainedEpisode(grammar=Grammar.regex("[0-9]"), accept=even, max_resamples=2)
    rows = make_actor(episode=episode).generate_sequences(["A", "B", "C", "D"], n=8, key="k")
    drawn = 0
    for text, end, rejected in zip(rows["response"], rows["finish"], rows["rejected"], strict=True):
        assert (end == "stop") == (int(text) % 2 == 0)
        assert rejected == 2 if end == "reject" else rejected <= 2
        drawn += rejected + 1
    assert drawn == len(seen)
    assert {"stop"} < set(rows["finish"]) <= {"stop", "reject"} and max(rows["rejected"]) == 2


def test_a_guard_by_number_stops_rejects_and_resamples(make_actor: MakeActor) -> None:
    def score(texts: list[str]) -> list[float]:
        return [float("nan") if "e" in text else -len(text) for text in texts]

    actor = make_actor(
        episode=ConstrainedEpisode(guard=ScoreGuard(score, -12, every=4, verdict="stop")),
        sampling=SamplingParams(max_new_tokens=40, ignore_eos=True),
    )
    rows = actor.generate_sequences(["A", "B"], n=8)
    assert set(rows["finish"]) == {"stop"} and max(rows.lengths("response_tokens")) < 40
    actor = make_actor(
        episode=ConstrainedEpisode(guard=ScoreGuard(score, -1000, every=4), max_resamples=5),
        sampling=SamplingParams(max_new_tokens=12, ignore_eos=True),
    )
    rows = actor.generate_sequences(["A", "B", "C"], n=8)
    assert sum(rows["rejected"]) > 0
    for text, end in zip(rows["response"], rows["finish"], strict=True):
        assert ("e" in text) == (end == "reject")


def test_the_rate_of_rejection_is_reported_and_the_rejected_abstain(
    make_actor: MakeActor, caplog: pytest.LogCaptureFixture
) -> None:
    episode = ConstrainedEpisode(
        grammar=Grammar.regex("[0-9]"), accept=lambda text, row: text in "01234", max_resamples=1
    )
    trainer = verl.Trainer(
        make_actor(episode=episode, optim={"lr": 1e-3}),
        reward_fn=lambda texts: [float(t) for t in texts],
        n=16,
        log_dir=False,
    )
    rows: list[Any] = []
    trainer.add_metric("seen", lambda batch: rows.append(batch) or 0.0)
    log = trainer.step(["A", "B", "C", "D"])
    batch = rows[0]
    drawn = sum(batch["rejected"]) + len(batch)
    kept = sum(end == "stop" for end in batch["finish"])
    assert 0.2 < log["rollout/rejection_rate"] < 0.8
    assert log["rollout/rejection_rate"] == pytest.approx(1 - kept / drawn)
    assert log["reward/abstained"] == len(batch) - kept > 0
    assert "masked" in caplog.text


def test_what_cannot_be_is_said(tiny: Path) -> None:
    problems: dict[str, Callable[[], Any]] = {
        r"invalid grammar \(regex\) '\(a'": lambda: Grammar.regex("(a"),
        r"invalid grammar \(json\)": lambda: Grammar.json_schema({"type": "objekt"}),
        "needs a grammar, a guard or accept": lambda: ConstrainedEpisode(),
        "max_resamples: must be at least 0": lambda: ConstrainedEpisode(grammar=Grammar.regex("a"), max_resamples=-1),
    }
    for message, make in problems.items():
        with pytest.raises(ConfigError, match=message):
            make()
    engine = verl.Actor.from_pretrained(str(tiny)).group.worker.rollout_engine
    with pytest.raises(RolloutError, match="leave ignore_eos out"):
        engine.add(Request("x", [5], SamplingParams(ignore_eos=True), grammar=Grammar.regex("a")))
    engine._responses = engine._responses._replace(tokenizer=None)
    with pytest.raises(RolloutError, match="no tokenizer"):
        engine.add(Request("x", [5], grammar=Grammar.regex("a")))
