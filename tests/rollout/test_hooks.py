"""Logits processors and guards: the same in our engines, alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from verl.errors import RolloutError
from verl.models.packed import PackedModel
from verl.rollout.base import Request, RolloutEngine, Sample, SamplingParams, Verdict, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.hf import HFEngine

PROMPT = list(range(10, 45))
LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)
MakeEngine = Callable[[], RolloutEngine]


@pytest.fixture(params=["embedded", "torch", "hf"])
def make_engine(
    request: pytest.FixtureRequest, packed64: PackedModel, tokenizer: PreTrainedTokenizerFast
) -> MakeEngine:
    def make() -> RolloutEngine:
        if request.param == "hf":
            return HFEngine(packed64.model, tokenizer, eos_token_ids=(2,), seed=0, max_batch=4)
        compiled = request.param == "embedded"
        return EmbeddedEngine(
            packed64, eos_token_ids=(2,), seed=0, tokenizer=tokenizer, kv_memory=8 << 20, compiled=compiled
        )

    return make


class Ascending:
    """Only tokens above the last one."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        assert list(tokens[:-1]) == self.seen[: len(tokens) - 1] if tokens else not self.seen
        self.seen = list(tokens)
        logits[: tokens[-1] + 1 if tokens else 0] = -torch.inf
        return logits


class Watch:
    """Says `verdict` of a text that satisfies `when`."""

    def __init__(self, every: int, verdict: Verdict, when: Callable[[str], bool]) -> None:
        self.every, self.verdict, self.when = every, verdict, when
        self.calls: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[Verdict]:
        self.calls.append(list(texts))
        return [self.verdict if self.when(text) else None for text in texts]


def answers(engine: RolloutEngine, requests: Sequence[Request]) -> dict[str, Sample]:
    return {sample.id: sample for sample in generate(engine, requests)}


def test_a_processor_shapes_its_own_request_alone(make_engine: MakeEngine, packed64: PackedModel) -> None:
    plain = answers(make_engine(), [Request(f"{i}", PROMPT, LONG) for i in range(4)])
    mixed = [Request(f"{i}", PROMPT, LONG, processors=(Ascending(),) if i % 2 else ()) for i in range(4)]
    got = answers(make_engine(), mixed)
    for i in range(4):
        tokens = got[f"{i}"].tokens
        assert (tokens == plain[f"{i}"].tokens) == (i % 2 == 0)
        assert i % 2 == 0 or tokens == sorted(set(tokens))
    # Its log-probs are still those of the model.
    tokens = got["1"].tokens
    with torch.no_grad():
        logits = packed64.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got["1"].log_probs, dtype=torch.float64), expected, atol=1e-6, rtol=0)


def test_where_nothing_may_come_the_response_is_rejected(make_engine: MakeEngine) -> None:
    def only_three(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return logits if len(tokens) < 3 else torch.full_like(logits, -torch.inf)

    sample = answers(make_engine(), [Request("x", PROMPT, LONG, processors=(only_three,))])["x"]
    assert (len(sample.tokens), len(sample.log_probs), sample.finish) == (3, 3, "reject")


def test_processors_follow_each_other_and_wrong_ones_are_named(make_engine: MakeEngine) -> None:
    def only_seven(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([7]), 0.0)

    greedy = SamplingParams(max_new_tokens=2, temperature=0)
    both = (only_seven, lambda tokens, logits: logits.roll(1))
    assert answers(make_engine(), [Request("x", PROMPT, greedy, processors=both)])["x"].tokens == [8, 8]
    engine = make_engine()
    engine.add(Request("x", PROMPT, LONG, processors=(lambda tokens, logits: logits[:5],)))
    with pytest.raises(RolloutError, match=r"'x'.*300.*5"):
        engine.step()


def test_a_guard_sees_the_text_every_k_tokens_and_at_the_end(
    make_engine: MakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    guard = Watch(6, None, lambda text: False)
    requests = [Request(f"{i}", PROMPT, LONG, guard=guard) for i in range(3)]
    got = answers(make_engine(), requests)
    assert [len(call) for call in guard.calls] == [3, 3, 3, 3]
    ends = dict(zip([6, 12, 18, 20], guard.calls, strict=True))
    for i in range(3):
        whole = tokenizer.decode(got[f"{i}"].tokens)
        assert (ends[20][i], got[f"{i}"].text, got[f"{i}"].finish) == (whole, whole, "length")
        # A character whose bytes are not all there is held back.
        assert all(whole.startswith(texts[i]) for texts in ends.values())
        assert any(ends[12])


@pytest.mark.parametrize(("verdict", "finish"), [("stop", "stop"), ("reject", "reject")])
def test_a_guard_ends_a_response(make_engine: MakeEngine, verdict: Verdict, finish: str) -> None:
    free = answers(make_engine(), [Request("x", PROMPT, LONG)])["x"]
    guard = Watch(4, verdict, lambda text: len(text) > 5)
    got = answers(make_engine(), [Request("x", PROMPT, LONG, guard=guard), Request("y", PROMPT, LONG)])
    assert (got["x"].finish, got["y"].finish) == (finish, "length")
    assert len(got["x"].tokens) % 4 == 0
    assert got["x"].tokens == free.tokens[: len(got["x"].tokens)]
    assert len(guard.calls[-1][0]) > 5 >= len(guard.calls[-2][0])


def test_a_guard_that_fails_leaves_the_engine_in_order(make_engine: MakeEngine) -> None:
    def fails(texts: Sequence[str]) -> list[Verdict]:
        return []

    fails.every = 20  # type: ignore[attr-defined]
    engine = make_engine()
    engine.add(Request("x", PROMPT, LONG, guard=fails))  # type: ignore[arg-type]
    engine.add(Request("y", PROMPT, SamplingParams(max_new_tokens=25, ignore_eos=True)))
    with pytest.raises(RolloutError, match="must return"):
        list(generate(engine, []))
    left = answers(engine, [])
    assert {name: (len(s.tokens), s.finish) for name, s in left.items()} == {"x": (20, "length"), "y": (25, "length")}
    fails.every = 0  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match="every 0"):
        engine.add(Request("z", PROMPT, LONG, guard=fails))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_gives_what_is_no_logit_is_told(
    make_engine: MakeEngine, value: float, temperature: float
) -> None:
    def force(tokens: Sequence[int], logits: Tensor) -> Tensor:
        logits[65] = value
        return logits

    params = SamplingParams(max_new_tokens=4, temperature=temperature)
    with pytest.raises(RolloutError, match=r"'x' at token 0 are not finite.*processor"):
        answers(make_engine(), [Request("x", PROMPT, params, processors=(force,))])


@pytest.mark.quick("embedded-3", "hf-0")
@pytest.mark.parametrize("when", [0, 3])
def test_a_processor_that_fails_once_changes_nothing(make_engine: MakeEngine, when: int) -> None:
    failed: list[int] = []

    def once(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if len(tokens) == when and not failed:
            failed.append(when)
            raise ConnectionError("away")
        return logits

    alone = {name: answers(make_engine(), [Request(name, PROMPT, LONG)])[name] for name in "xy"}
    engine = make_engine()
    engine.add(Request("y", PROMPT, LONG))
    engine.add(Request("x", PROMPT, LONG, processors=(once,)))
    with pytest.raises(ConnectionError):
        list(generate(engine, []))
    for name, sample in answers(engine, []).items():
        assert sample.tokens == alone[name].tokens
        assert sample.log_probs == pytest.approx(alone[name].log_probs, abs=1e-9)


def test_what_was_asked_for_is_taken_back_after_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RolloutError, match="'bad'"):
        list(generate(engine, [Request("good", PROMPT, LONG), Request("bad", [])]))
    assert engine.unfinished == 0
    assert len(answers(engine, [Request("good", PROMPT, LONG)])["good"].tokens) == 20
