"""One reader for the row's answer and the response's: what it takes for one, and laws that hold for every answer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verdicts.table import FORMS, pairs
from verl.errors import RewardError
from verl.rewards.answers import answer_in
from verl.rewards.equality import UnsureError, is_same
from verl.rewards.maths import Equality
from verl.rewards.values import read

is_equal = Equality()
pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")

#: The row's answer, a response in a box, and what it is: forms of one thing, and what is written alike.
BOXED = [
    *((answer, response, 1.0) for answer, response in [
        ("(1, 4.5)", r"(1, \frac{9}{2})"), (r"\frac{x}{7}+\frac{2}{7}", r"\frac{x+2}{7}"),
        (r"\sec^2(y)", r"\tan^2(y)+1"),
        ("-34x-45y+20z-100=0", "34x+45y-20z+100=0"), ("-1 + e^{16}", "e^{16} - 1"), ("14.0 - 1.0i", "14 - i"),
        (r"\dfrac{\pi}{2}", r"\pi/2"), (r"\sqrt{8}", r"2\sqrt{2}"), ("0.5", r"\frac{1}{2}"), ("1,234.5", "1234.5"),
        (r"1.2 \times 10^3", "1200"), (r"x \le 2", r"(-\infty, 2]"), (r"(-\infty, 2]", r"x \le 2"),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\{3, 2, 1\}", r"\{1, 2, 3\}"), (r"90^\circ", "90"), (r"\frac{-3}{4}", r"-\frac{3}{4}"),
        (r"3\frac{1}{4}", r"\frac{13}{4}"), (r"\$70,000", "70000"), (r"25\%", r"25\%"), (r"\binom{5}{2}", "10"),
        (r"25\%", "0.25"), ("5 km", "5000 m"), ("90 minutes", "1 hour 30 minutes"), ("60 mph", "60 miles per hour"),
        (r"\$5", "500 cents"), ("16 square feet", r"16\text{ ft}^2"), ("January 5, 2024", "2024-01-05"),
        ("10:30 pm", "22:30"), ("5-7", "5–7"), ("twenty-one", "21"), ("1.5 million", "1500000"),
        ("1/3", r"0.\overline{3}"),
        ("1/3", "0.333333"), (r"(-\infty,1)\cup(3,\infty)", "x < 1 or x > 3"), ("(2, 3)", "x = 2, y = 3"),
        ("x + 2y = 8", r"y = -\frac{1}{2}x + 4"), (r"\mathbb{R}", r"\text{all real numbers}"), ("3, -3", r"\pm 3"),
        ("C", r"\text{C. Paris}"), ("B, C", "C, B"), ("red, blue", "blue and red"), ("(2, 3)", r"\langle 2, 3 \rangle"),
    ]),
    *((answer, response, 0.0) for answer, response in [
        ("2024-01-05", "2018"), ("7:05", "1.4"), ("555-1234", "-679"), ("5-7", "-2"), ("3-2", "1"), ("10:30", "20:60"),
        ("12:00", "1:00"), ("6:45", "0.15"), ("11-12", "12-13"), ("2024-01-05", "2024-05-01"),
        ("2024-01-05", "5/1/2023"),
        ("10:30 am", "10:30 pm"), (r"10:30 \text{ a.m.}", r"10:30 \text{ p.m.}"), ("1/2/2024", r"\frac{1}{4048}"),
        ("5 cm", "5 km"), (r"5\%", "5"), ("5", r"5\%"), ("16 square feet", "16 feet"), ("A", "(A) or (B)"),
        ("(-1, 3)", "[-1, 3]"), ("(1, 2)", "(2, 1)"), ("(2, 3)", "x = 3, y = 2"), ("(1, 2)", r"\{1, 2\}"),
        ("1/3", "0.33"),
        ("2", "2.0000001"), (r"\pi", "3.14"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("101_2", "110_2"),
        ("3x-y+13=0", "13"), ("17", "3x + 4y = 17"), ("4", "|x| = 4"), ("2 1/3", "21/3"), ("x^2", "x^2 + C"),
        ("5", "at least 5"), ("11", r"\text{Apollo 11}"), ("23", "2*3"), ("5", "5!"), ("12", "1 2"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response", "right"), BOXED)
def test_one_thing_in_two_forms_is_one_and_what_looks_alike_is_not(answer: str, response: str, right: float) -> None:
    assert is_equal(rf"So it is $\boxed{{{response}}}$.", answer) == right


@pytest.mark.parametrize(
    ("answer", "response"),
    [("10:30", "10:30 pm"), ("1/2/2024", "2024-02-01"), ("12 dogs", "12 cats"), ("3:4", "3/4"), ("101_2", "101")],
)
def test_what_depends_on_the_question_abstains(answer: str, response: str) -> None:
    with pytest.raises(RewardError, match="cannot be compared"):
        is_equal(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 3x + 5.", "3"),
        ("The answer is 3x + 5.", "5"),
        ("The area is 9π.", "9"),
        ("(3, 7)", "7"),
        ("The answer is x > 4.", "4"),
        ("The answer is $3^4$.", "3"),
        ("The probability is 3 out of 10", "3"),
        ("The answer is 4 and 9.", "9"),
        ("The answer is not 42.", "42"),
        ("The answer isn't 42", "42"),
        ("I would not say that the answer is 42.", "42"),
        ("42 is wrong.", "42"),
        ("The answer is 41, not 42.", "42"),
        ("(A) or (B)", "B"),
        ("Answer: m+n = 256+37 = 293", "256"),
        ("#### 12", "2"),
        ("#### Final answer\n\n41", "42"),
        ("It is increasing on $(0, \\infty)$.", "decreasing on (0, \\infty)"),
        ("A loss of 40 dollars", "a profit of 40 dollars"),
        ("The answer is \\boxed{\\text{a maximum at } x = 2}", "a minimum at x = 2"),
    ],
)
def test_no_fragment_and_nothing_denied_is_an_answer(response: str, answer: str) -> None:
    assert is_equal(response, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("5/6.", "5/6"),
        ("Answer: m+n = 256+37 = 293", "293"),
        ("#### 2*7 + 3*6 = 32", "32"),
        ("The answer is $1,234.00.", "1234"),
        ("The answer is **-5**.", "-5"),
        ("Final answer: 082", "82"),
        ("<answer>\n  42\n</answer>", "42"),
        ("So 12+25+25 = \\boxed{62}", "62"),
        ("The answer is 3.50 dollars", "3.5"),
        ("#### 5 apples", "5"),
        ("Answer: 10:30", "10:30"),
        ("The answer is 41, not 42.", "41"),
        ("#### Final answer\n\n42", "42"),
        ("#### Final answer: 42", "42"),
        ("#### 42\n\nI hope this helps.", "42"),
        ("The answer is 42.\n\nDo you have questions?", "42"),
        ("Answer:\n\\[\n42\n\\]", "42"),
        ("✅ Final answer: **42**", "42"),
        ("Yes, because 2 is even.", "yes"),
        ("The equation has no solutions.", "no solution"),
    ],
)
def test_the_answer_of_a_text_is_found(response: str, answer: str) -> None:
    assert is_equal(response, answer) == 1.0


#: Answers of many kinds, beside those of the corpus.
ANSWERS = r"""
.5 | 5. | 2 1/3 | -1.5 | 10^{-3} | 1e-5 | 6.02 × 10^{23} | 0.\overline{3} | 0.333... | 25% | \$70,000 | €5 | 5 m/s
10 cm^2 | 2^{10} | 5! | n! | 9π | 2\sqrt{3} | \sqrt[3]{5} | (0, 1] | x < 1 or x > 3 | {1, 2} | 2 or 3 | (1, 2, 3)
\pm 3 | 2i | a+bi | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | 3x - y + 13 = 0 | f(x) = \sin(x) | y'' + y = 0
(x, y) = (1, 2) | x \ne 2 | 1/2/2024 | 5 January 2024 | 10:30 \text{ a.m.} | 22:15 | 5 to 7 | 3:4:5 | (555) 123-4567
101_2 | 1A_{16} | A, C | C. Paris | \textbf{(B)}\ 4 | St. Louis | Washington, D.C. | H2O | Apollo 11 | the Nile
\text{no} | does not exist | two thirds | x \equiv 3 \pmod 5 | 1, 2, \ldots, n | 3 hours 20 minutes | p \land q
A \cap B | \angle ABC | 2x\,dx | it's | 1990s | \|x\| | There are 5 apples and 3 pears | Therefore, 1+2 = 3
at least 5 | red and blue | v1.2.3 | 192.168.0.1 | N/A | \frac{d}{dx}
"""


@pytest.mark.parametrize("answer", ANSWERS.strip().replace("\n", " | ").split(" | "))
def test_an_answer_is_itself_in_every_form(answer: str) -> None:
    for form in FORMS.values():
        text = form.format(answer.removesuffix("."))
        assert is_equal(text, answer) == is_equal(answer, text) == 1.0
        one, two = read(answer_in(answer)), read(answer_in(text))
        assert one is None or two is None or is_same(one, two)  # not by its letters alone


@settings(max_examples=60, deadline=None)
@given(st.fractions(max_denominator=10**4), st.fractions(max_denominator=10**4))
def test_numbers_are_equal_where_their_values_are(one: Fraction, two: Fraction) -> None:
    sign, top, bottom = "-" if one < 0 else "", abs(one.numerator), one.denominator
    spelt = [f"{one}", f"The answer is {one}.", rf"$\boxed{{{one}}}$"]
    if bottom > 1:
        spelt.append(rf"{sign}\frac{{{top}}}{{{bottom}}}")
    if sign == "" and top // bottom and top % bottom:
        spelt.append(rf"{top // bottom} {top % bottom}/{bottom}")
    assert {is_equal(text, str(one)) for text in spelt} == {1.0}
    assert is_equal(str(two), str(one)) == is_equal(str(one), str(two)) == float(one == two)


@pytest.mark.slow
def test_verdicts_do_not_depend_on_the_order() -> None:
    for pair in pairs():
        if isinstance(pair.answer, str):
            one, two = read(answer_in(pair.answer)), read(answer_in(pair.response))
            if one is not None and two is not None:
                assert _verdict(one, two) == _verdict(two, one), pair


def _verdict(*values: object) -> bool | None:
    try:
        return is_same(*values, unevaluated=True)  # type: ignore[arg-type]
    except UnsureError:
        return None


@pytest.mark.parametrize("part", ["$", r"\boxed{", "answer ", r"\begin{", "#### ", "\n", "(", "1-", "not a "])
def test_a_long_text_is_read_in_time(part: str) -> None:
    begin = time.process_time()
    assert is_equal(part * 2000, "5") == 0.0
    assert time.process_time() - begin < 2


def test_two_plain_numbers_are_compared_without_sympy() -> None:
    code = """
import sys
from verl.rewards.maths import Equality
is_equal = Equality()
assert is_equal(r"So \\boxed{42}.", "42.0") == 1.0 and is_equal("The answer is 1,000 apples.", "#### 1000") == 1.0
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
