"""Whether two answers are mathematically equal. math-verify compares expressions; cases that it rounds, or calls equal
after a look at one side, are compared here."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from verl.rewards.values import Value, parse, read

#: Commands with which a number is worked out, and those that ask for a value.
_CLOSED = frozenset(["frac", "sqrt", "pi", "cdot", "times", "infty", "pm", "exp"])
_ASKS = frozenset(["d", "int", "iint", "oint", "sum", "prod", "lim", "partial"])
#: Units that sympy has under another name.
_UNITS = {
    "mph": "mile/hour", "kmph": "km/hour", "kmh": "km/hour", "kph": "km/hour", "min": "minute", "sec": "second",
    "hr": "hour", "lb": "pound", "in": "inch", "deg": "degree", "arcminute": "degree/60", "week": "7*day",
    "$": "dollar", "cent": "dollar/100", "dollar": "dollar", "€": "euro", "£": "sterling", "%": "percent",
}  # fmt: skip
#: Units that it has not.
_OTHERS = frozenset(("dollar", "euro", "sterling", "degC", "degF"))


class UnsureError(Exception):
    """Two answers may be equal or not, depending on the question."""


def is_same(gold: Value, answer: Value, unevaluated: bool = False) -> bool:
    """Whether an answer is the row's.

    Args:
        unevaluated: an answer need not be worked out: `123*456` is 56088.

    Raises:
        UnsureError: that depends on the question.
    """
    kinds = {gold.kind, answer.kind}
    if "choice" in kinds:
        return _is_same_choice(gold, answer, unevaluated)
    if kinds == {"named"}:
        return bool(gold.content[0] == answer.content[0]) and is_same(gold.content[1], answer.content[1], unevaluated)
    if "equation" in kinds:
        return kinds <= {"equation", "named"} and _is_multiple(_difference(gold), _difference(answer))
    if "named" in kinds:
        gold, answer = (each.content[1] if each.kind == "named" else each for each in (gold, answer))
        return is_same(gold, answer, unevaluated)
    if kinds == {"sequence"}:
        return _has_same_items(gold, answer, unevaluated)
    if "region" in kinds:
        return _is_same_region(gold, answer)
    if kinds <= {"number", "expression", "compound"}:
        return (unevaluated or _is_evaluated(gold, answer)) and _is_same_quantity(gold, answer)
    if kinds <= {"clock", "groups", "base", "number"}:
        return _has_same_digits(gold, answer)
    if kinds == {"date"} and gold.content & answer.content and gold.content != answer.content:
        raise UnsureError("day and month may be in either order")
    if kinds == {"relation"}:
        return _verifies(gold.content, answer.content)
    return len(kinds) == 1 and bool(gold.content == answer.content)


def _is_same_choice(gold: Value, answer: Value, unevaluated: bool) -> bool:
    if gold.kind == answer.kind:
        if gold.content == answer.content and len({gold.text.casefold(), answer.text.casefold(), ""}) > 2:
            raise UnsureError("one letter has two texts")
        return bool(gold.content == answer.content)
    option, other = (gold, answer) if gold.kind == "choice" else (answer, gold)
    content = read(option.text)
    return other.text.upper() == option.content or (content is not None and is_same(content, other, unevaluated))


def _difference(value: Value) -> Any:
    """The sides' difference of an equation, or of a named value as one."""
    if value.kind == "equation":
        return value.content
    left, right = parse(value.content[0]), parse(value.content[1].text)
    return None if left is None or right is None else left - right


def _is_multiple(one: Any, two: Any) -> bool:
    """Whether two equations have one solution: a side is a multiple of the other's, up to what it is divided by."""
    from sympy import fraction, simplify, together

    if one is None or two is None or 0 in (one, two):
        return bool(one == two)
    ratio = simplify(fraction(together(one))[0] / fraction(together(two))[0])
    return bool(ratio.is_number and ratio != 0)


def _has_same_items(gold: Value, answer: Value, unevaluated: bool) -> bool:
    """Whether two lists, tuples or sets have the same items; in the same order, where one of them has an order."""
    items, others, forms = gold.content, list(answer.content), {gold.unit, answer.unit}
    dots = [any(item.content == "..." for item in part) for part in (items, others)]
    if any(dots):
        pairs = [pair for pair in zip(items, others, strict=False) if "..." not in (pair[0].content, pair[1].content)]
        if all(dots) and len(items) != len(others) and all(is_same(*pair, unevaluated) for pair in pairs):
            raise UnsureError("a sequence goes on")
        forms = {"()"}
    is_pair_or_set = len(items) == 2 or "{}" in forms
    if len(items) != len(others) or (is_pair_or_set and len(forms - {""}) > 1):
        return False
    names = [len({item.content[0] for item in part if item.kind == "named"}) for part in (items, others)]
    if forms - {"", "{}"} or (min(names) == 0 and max(names) > 1):
        return all(is_same(*pair, unevaluated) for pair in zip(items, others, strict=True))
    for item in items:
        index = next((index for index, other in enumerate(others) if is_same(item, other, unevaluated)), None)
        if index is None:
            return False
        del others[index]
    return True


def _is_same_region(gold: Value, answer: Value) -> bool:
    from sympy import Set

    one, two = (value.content if value.kind == "region" else parse(value.text) for value in (gold, answer))
    if not isinstance(one, Set) or not isinstance(two, Set) or len({gold.unit, answer.unit} - {"", "()", "[]"}) > 1:
        return False
    return bool(one == two or one.symmetric_difference(two).is_empty)


def _has_same_digits(gold: Value, answer: Value) -> bool:
    """Whether two times, ratios, ranges and the like are one."""
    if gold.kind == answer.kind and gold.content == answer.content:
        return True
    digits = [re.findall("[0-9A-F.]+", value.text) for value in (gold, answer)]
    if gold.kind == answer.kind == "clock" and gold.unit != answer.unit:
        (hour, *minutes), (other_hour, *others) = gold.content, answer.content
        is_unsure = (hour - other_hour) % 12 == 0 and minutes == others and (hour if answer.unit else other_hour) < 13
    else:
        is_unsure = gold.kind != answer.kind and digits[0] == digits[1]
    if is_unsure:
        raise UnsureError("times of day, ratios, ranges and numbers may be written alike")
    return False


def _is_evaluated(gold: Value, answer: Value) -> bool:
    """Whether an answer is worked out as far as the row's: a number wants a number."""
    if gold.kind == "number" == answer.kind:
        is_quotient = answer.content.denominator == 1 and re.search("/|frac", answer.text)
        return not is_quotient or bool(re.search("/|frac", gold.text))
    if gold.kind == "number":
        return answer.kind == "compound"
    texts = (value.text.replace(r"\arc", "\\").replace(r"\ln", r"\log") for value in (gold, answer))
    has, new = ({*re.findall(r"(?<=\\)[A-Za-z]+|!|(?<={)d(?=}{d)", text)} for text in texts)
    return (new & _ASKS if getattr(gold.content, "free_symbols", ()) else new - _CLOSED) <= has


def _is_same_quantity(gold: Value, answer: Value) -> bool:
    words = [{word.casefold().removesuffix("s") for word in value.unit.split()} for value in (gold, answer)]
    is_several = "compound" in (gold.kind, answer.kind)
    if is_several and not (gold.unit and answer.unit):
        return False
    if not is_several and (not (gold.unit and answer.unit) or words[0] == words[1]):
        scales = [100 if each & {"%", "percent"} else 1 for each in words]
        return _is_equal(gold.content / scales[0], answer.content / scales[1], gold.text, answer.text)
    totals = [_total(value) for value in (gold, answer)]
    if None not in totals:
        return bool((totals[0] - totals[1]).simplify() == 0)
    is_equal = not is_several and _is_equal(gold.content, answer.content, gold.text, answer.text)
    if is_equal and not (words[0] <= words[1] or words[1] <= words[0]):
        raise UnsureError(f"{gold.unit!r} and {answer.unit!r}")
    return is_equal


def _is_equal(one: Any, two: Any, text: str, other: str) -> bool:
    """Whether two numbers or expressions, as they are written, are equal: a decimal of six places and digits or more up
    to its rounding."""
    if one == two:
        return True
    is_number = not (getattr(one, "free_symbols", ()) or getattr(two, "free_symbols", ()))
    decimals = [each for each in (text, other) if re.fullmatch(r"-?(?=[\d.]*[1-9][\d.]{5})\d*\.\d{6,}", each)]
    if is_number and decimals:
        places = min(len(each.partition(".")[2]) for each in decimals)
        if getattr(one - two, "is_comparable", True) and abs(one - two) <= Fraction(1, 2 * 10**places):
            return True
    if isinstance(one, Fraction) and isinstance(two, Fraction):
        return False
    from sympy import N, Rational

    one, two = (Rational(str(each)) if isinstance(each, Fraction) else each for each in (one, two))
    if not is_number:
        return _verifies(one, two)
    size, distance = (abs(N(each.doit(), 30)) for each in (one, one - two))
    return bool(size.is_finite and distance.is_finite and distance <= size * Rational(1, 10**20))


def _verifies(one: Any, two: Any) -> bool:
    """What math-verify says of two expressions, in either order."""
    from math_verify import verify

    # It warns that without a deadline of its own, which takes signals, somebody else must keep one.
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    return any(verify(*pair, timeout_seconds=None) for pair in ((one, two), (two, one)))


def _total(value: Value) -> Any:
    """A quantity in the units of the SI; None: one of its units is not known."""
    from sympy import Expr, Integer, Symbol, parse_expr
    from sympy.physics import units
    from sympy.physics.units import convert_to, kilogram, meter, second

    total = Integer(0)
    for part in value.content if value.kind == "compound" else (value,):
        text = re.sub(r"\b(sq|cu)(?:uare|bic|\.)?\s+(\w+)", lambda m: f"{m[2]}^{2 if m[1] == 'sq' else 3}", part.unit)
        text = re.sub(r"\s*\bper\b\s*", "/", text.replace("metre", "meter").replace("litre", "liter"))
        text = re.sub(r"[^\W\d_]+|[$€£%]", lambda m: f"({_UNITS.get(m[0].removesuffix('s'), m[0])})", text)
        text = re.sub("[{}]", "", text).replace("^", "**").replace("·", "*")
        words = re.findall("[A-Za-z]+", text)
        names = {name: Symbol(name) if name in _OTHERS else getattr(units, name, None) for name in words}
        if not re.fullmatch(r"[\w()*/ -]*", text) or not all(isinstance(unit, Expr) for unit in names.values()):
            return None
        total += convert_to(part.content * parse_expr(text, names), [meter, kilogram, second])
    return total
