"""Answers compared as mathematics, in processes that can be killed; rewards by a registered name."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import pytest

import verl
from verl.config import build_config
from verl.errors import ConfigError, RewardError
from verl.rewards.make import make_reward
from verl.rewards.maths import Equality

is_equal = Equality()
needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
#: Takes forever to evaluate.
TOWER = r"\boxed{9^{9^{9^{9}}}}"


@needs_math_verify
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so it is 18", "3 * 6 = <<3*6=18>>18\n#### 18", 1),
        ("3 * 6 = 18\n#### 1,234", "1234", 1),
        ("#### $1,000 a year", "1000", 1),
        (r"thus \boxed{\frac12}", "0.5", 1),
        (r"$x = 4$ and so \boxed{3}", "3", 1),
        (r"$x = 4$ and so \boxed{3}", "4", 0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"we get $\frac{3}{4}$", r"\frac{3}{4}", 1),
        ("The answer is 7.", 7, 1),
        ("The answer is 7.", "8", 0),
        ("-5", "5", 0),
        # Thoughts are no answer, and an answer that is taken back is none.
        ("<think>so \\boxed{3}</think>\n\\boxed{4}", "4", 1),
        ("so \\boxed{4}</think>\n\\boxed{3}", "4", 0),
        ("<think>\\boxed{3}</think>\n4", "4", 1),
        ("<think>\\boxed{4}</think>\n3", "4", 0),
        ("<think>\\boxed{4}", "4", 1),
        ("<think>so 3</think> <answer> \\frac{1}{2} </answer> \\boxed{3}", "1/2", 1),
        ("<answer>4</answer>", "4", 1),
        ("<answer>4</answer>", "5", 0),
        ("So \\boxed{3}. Wait, that is wrong. Now \\boxed{4}.", "4", 1),
        ("So \\boxed{4}. Wait, that is wrong. Now \\boxed{3}.", "4", 0),
        ("So $\\boxed{4}$. Wait. $\\boxed{3}$", "4", 0),
        ("$x = \\boxed{3}$ and $y=\\boxed{4}$", "3, 4", 1),
        ("$x = \\boxed{3}$ and $y=\\boxed{4}$", "4", 0),
        ("(a) \\boxed{3} (b) \\boxed{4}", "3, 4", 1),
        ("\\boxed{10\\,000}", "10000", 1),
        ("\\boxed{10}", "10\\,000", 0),
        ("I do not know", "5", 0),
        ("", "5", 0),
    ],
)
def test_answers_are_equal_as_mathematics(response: str, answer: Any, expected: float) -> None:
    assert is_equal(response, answer) == expected


#: The row's answer; responses that are right; responses that are wrong.
READ = [
    ("The answer is 10", [r"\boxed{10}", "It is 10.", r"\boxed{The answer is 10}"], [r"\boxed{11}", "10 and then 11"]),
    ("10.", [r"\boxed{10}", "10"], [r"\boxed{10.5}"]),
    ("**73**", ["**73**", "Final answer: **73**"], ["**72**"]),
    ("Therefore, 1+2 = 3", [r"\boxed{3}", r"\boxed{1+2=3}"], [r"\boxed{1+2=4}", r"\boxed{1}"]),
    ("7 - 3 = 4", [r"\boxed{4}"], [r"\boxed{7}", r"\boxed{7-3=5}"]),
    ("We get \\boxed{7} apples.", [r"\boxed{7}", "so 7"], [r"\boxed{8}"]),
    ("The area is \\frac{1}{2}.", [r"\boxed{0.5}", r"$\frac12$"], [r"\boxed{2}"]),
    (
        "5 m/s",
        [r"\boxed{5 \mathrm{m/s}}", r"\boxed{5}", r"\boxed{5 m/s}", "It is 5 m/s."],
        [r"\boxed{6 m/s}", r"\boxed{50}"],
    ),
    ("10 cm^2", [r"\boxed{10\text{ cm}^2}", r"\boxed{10 cm^2}", r"\boxed{10}"], [r"\boxed{20 cm^2}"]),
    ("12 dogs", [r"\boxed{12}", r"\boxed{12 dogs}", r"\boxed{12 \text{ dogs}}"], [r"\boxed{13 dogs}"]),
    ("10", [r"\boxed{10 cm}", r"\boxed{10 apples}"], [r"\boxed{10x}", r"\boxed{10 + y}"]),
    ("1331 and 1728", [r"\boxed{1331, 1728}", r"\boxed{1728 \text{ and } 1331}"], [r"\boxed{1728}", r"\boxed{1331}"]),
    ("The solutions are 1331 and 1728.", [r"\boxed{1728, 1331}"], [r"\boxed{1728}", r"\boxed{1331, 1729}"]),
    ("3x-y+13=0", [r"\boxed{6x-2y+26=0}"], [r"\boxed{3x+4y+14=0}", r"\boxed{0}", r"\boxed{13}"]),
    ("x = 2 or x = 3", [r"\boxed{2, 3}", r"\boxed{x=3 \text{ or } x=2}"], [r"\boxed{3}", r"\boxed{2, 4}"]),
    ("2pi", [r"\boxed{2\pi}"], [r"\boxed{2}"]),
    ("1e5", [r"\boxed{100000}"], [r"\boxed{1}"]),
    ("2xyz", [r"\boxed{2xyz}"], [r"\boxed{2}"]),
    (
        "Paris",
        [r"\boxed{Paris}", "The answer is Paris.", r"\boxed{\text{paris}}"],
        [r"\boxed{pairs}", "Rome", "Is it 7?"],
    ),
    ("The answer is no solution", [r"\boxed{\text{no solution}}"], [r"\boxed{0}"]),
    ("(B)", [r"\boxed{B}", "The answer is (B)."], [r"\boxed{A}", "The answer is A"]),
    ("The two numbers: 4 and 5", [r"\boxed{5, 4}"], [r"\boxed{4}", r"\boxed{2}"]),
    (["4"], [r"\boxed{4}"], [r"\boxed{5}"]),
    (["1/2", "7"], [r"\boxed{0.5}", "7"], [r"\boxed{2}", r"\boxed{1/2, 7}"]),
    ('["42", "43"]', [r"\boxed{42}", r"\boxed{43}"], [r"\boxed{44}"]),
    (r"1.6 \times 10^{-19}", [r"\boxed{1.6e-19}", r"\boxed{16 \times 10^{-20}}"], [r"\boxed{0}", r"\boxed{1.6e-18}"]),
    (r"\frac{1}{2^{99}}", [r"\boxed{2^{-99}}"], [r"\boxed{\frac{1}{2^{98}}}"]),
    ("0", [r"\boxed{0.0}", r"\boxed{-0}"], [r"\boxed{0.0000001}"]),
    (
        "C",
        ["The answer is **C**.", "C. Paris", r"\boxed{\textbf{(C)}\ 4}", "It is (C) Paris", "**C.** Paris"],
        ["D. Paris", r"\boxed{\textbf{(B)}\ 4}", "$C = 4$", "Cats. Paris"],
    ),
    (r"\textbf{(B)}\ 4", [r"\boxed{B}", r"\boxed{\text{(B)}}"], [r"\boxed{A}"]),
    ("2 1/3", [r"\boxed{\frac{7}{3}}", r"\boxed{2\frac13}", r"\boxed{2⅓}"], [r"\boxed{2/3}", r"\boxed{21/3}"]),
    (r"\sqrt{2} + x^2", [r"\boxed{√2 + x²}", r"\boxed{x² + √(2)}"], [r"\boxed{√2 + x2}", r"\boxed{√3 + x²}"]),
    ("42", [r"$x = \mathbf{42}$", r"\boxed{４２}", "so **42**"], [r"$x = \mathbf{24}$", "4**2"]),
    (r"\emptyset", [r"\boxed{\varnothing}"], [r"\boxed{0}"]),
]


@pytest.mark.quick(every=3)
@needs_math_verify
@pytest.mark.parametrize(("answer", "right", "wrong"), READ, ids=[str(case[0]) for case in READ])
def test_answers_in_words_are_read(answer: Any, right: list[str], wrong: list[str]) -> None:
    assert {response: is_equal(response, answer) for response in right} == dict.fromkeys(right, 1.0)
    assert {response: is_equal(response, answer) for response in wrong} == dict.fromkeys(wrong, 0.0)


@needs_math_verify
@pytest.mark.parametrize(
    "answer",
    [
        "",
        " ",
        "???",
        "There are 5 apples and 3 pears",
        r"p \lor q",
        "####",
        float("nan"),
        {"target": ["5"]},
        '{"a": 5}',
    ],
)
def test_an_answer_that_cannot_be_read_leaves_the_sample_out(answer: Any) -> None:
    for response in (r"\boxed{5}", "3", "20"):
        with pytest.raises(RewardError, match="the row"):
            is_equal(response, answer)


def test_of_a_list_of_answers_one_is_enough_or_all_are_wanted() -> None:
    assert [is_equal(response, [42, 43]) for response in ("42", "43", "42, 43")] == [1.0, 1.0, 0.0]
    assert [Equality("all")(response, [42, 43]) for response in ("42", "43", "43, 42")] == [0.0, 0.0, 1.0]


@needs_math_verify
def test_what_is_not_worked_out_is_right_by_an_option() -> None:
    asked = {
        "123*456": "56088",
        r"\int_0^1 2x \, dx": "1",
        "2^{10}": "1024",
        "10/2": "5",
        r"\binom{5}{2}": "10",
        r"\frac{d}{dx} x^2": "2x",
    }
    for response, answer in asked.items():
        assert is_equal(rf"\boxed{{{response}}}", answer) == 0.0
        assert Equality(unevaluated=True)(rf"\boxed{{{response}}}", answer) == 1.0
        assert is_equal(rf"\boxed{{{answer}}}", response) == 1.0


@needs_math_verify
def test_answers_that_cannot_be_read_are_named_before_a_run(caplog: pytest.LogCaptureFixture) -> None:
    reward = verl.Reward("math")
    try:
        reward.source.check_data([{"answer": ["5"]}, {"answer": ["1/2", "p \\lor q"]}])  # type: ignore[attr-defined]
        assert "are not right" not in caplog.text
        rows = [{"answer": "5"}, {"answer": "There are 5 apples and 3 pears"}]
        reward.source.check_data(rows)  # type: ignore[attr-defined]
        assert "1 of the first 2 answers are not right" in caplog.text and "cannot be read: 'There are" in caplog.text
        with pytest.raises(RewardError, match=r"2 of the first 2 .*mapping \(target\)"):
            reward.source.check_data([{"answer": {"target": ["5"]}}] * 2)  # type: ignore[attr-defined]
    finally:
        reward.close()


@pytest.mark.slow
@needs_math_verify
def test_a_data_set_without_an_answer_that_can_be_read_ends_the_run_by_name() -> None:
    reward = verl.Reward("math", timeout=30.0)
    try:
        with pytest.raises(RewardError, match=r"'math' failed on 64 of the latest 64 .*cannot be read: '\?\?\?'"):
            reward.get_reward(verl.Batch.from_rows([{"response": r"\boxed{12}", "answer": "???"}] * 64))
    finally:
        reward.close()


@needs_math_verify
def test_what_hangs_is_killed_and_abstains_alone() -> None:
    reward = verl.Reward("math", timeout=3.0, max_failure_rate=1.0)
    rows = [
        {"response": "#### 5", "answer": "5"},
        {"response": TOWER, "answer": "2^{5}"},
        {"response": r"\boxed{6}", "reward_model": {"style": "rule", "ground_truth": "5"}},
        {"response": "5", "answer": None},
    ]
    try:
        found, counts = asyncio.run(reward.score_and_count(verl.Batch.from_rows(rows)))
        assert found["reward"] == [1.0, None, 0.0, None]
        assert "no answer within 3 s" in found["abstain_reason"][1]
        assert "ground_truth or answer" in found["abstain_reason"][3]
        assert counts["late/count"] == 1 and counts["deaths/count"] == 1
        assert not reward.source.whole_batch
    finally:
        reward.close()


@needs_math_verify
def test_as_a_part_it_has_processes_and_the_others_none() -> None:
    reward = verl.Reward({"right": ("math", 2.0), "brief": lambda texts: [-float(len(text)) for text in texts]})
    try:
        assert list(reward.groups) == ["math"]
        rows = verl.Batch.from_rows([{"response": "5", "answer": "5"}, {"response": "66", "answer": "5"}])
        assert reward.get_reward(rows)["reward"] == [1.0, -2.0]
    finally:
        reward.close()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-hybrid\[math\]'"):
        make_reward("math")


@verl.register_reward("test_short")
def short(texts: list[str]) -> list[float]:
    return [-float(len(text)) for text in texts]


@verl.register_reward("test_longer_than")
class LongerThan:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, texts: list[str]) -> list[float]:
        return [float(len(text) > self.least) for text in texts]


def test_registered_rewards_are_taken_by_name_with_their_options() -> None:
    texts = ["a", "bbb"]
    assert verl.Reward("test_short").get_reward(texts)["reward"] == [-1.0, -3.0]
    longer = make_reward("test_longer_than", least=2, timeout=7.0)
    assert (longer.name, longer.timeout) == ("test_longer_than", 7.0)  # type: ignore[attr-defined]
    both = {"one": "test_short", "two": {"source": "test_longer_than", "weight": 10, "least": 2}}
    assert verl.Reward(both).get_reward(texts)["reward"] == [-1.0, 7.0]
    assert build_config({"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"train": "x.jsonl"},
                         "reward": {"name": "test_short"}}).reward.name == "test_short"  # fmt: skip


def test_wrong_names_and_options_of_registered_rewards_are_told() -> None:
    for name, words in (("test_short", "taken by .*short"), ("task", "taken by .*TaskReward")):
        with pytest.raises(ConfigError, match=words):
            verl.register_reward(name)(lambda texts: [0.0])
    with pytest.raises(ConfigError, match=r"'test_longer_than'.*least"):
        make_reward("test_longer_than")
    with pytest.raises(ConfigError, match="no option 'lest'"):
        make_reward("test_longer_than", least=1, lest=2)
    with pytest.raises(ConfigError, match="did you mean 'test_short'"):
        make_reward("test_shor")
