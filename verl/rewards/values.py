"""What an answer says: one reader for the row's answer and the response's."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

#: Words that belong to an expression, and words of a sentence that are as short as the names of variables.
_MATHS = re.compile("and|or|sqrt|frac|mod|gcd|lcm|max|min|det")
_SHORT = re.compile(
    "the|is|are|was|has|not|yes|no|so|we|he|she|it|its|at|by|an|as|be|if|of|on|to|in|for|per|all|you|who|am|pm|sq|up|do|my|me|us"
)
_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen
"""
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
_SPOKEN = {word: 10 * n for n, word in enumerate(_TENS.split())} | {word: n for n, word in enumerate(_ONES.split())}
_TIMES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8}
_UNIT = (
    r"(?:[mµnkMG]?(?:m|g|s|l|L|W|J|N|V|A|Pa|Hz|eV|Wh)|[cd]m|hr?|min|sec|ft|in|yd|mi|lb|oz|mol|k?cal|[mk]ph|rpm|K)"
    r"(?:\^?\{?-?\d\}?)?"
)
_MEASURE = re.compile(rf"{_UNIT}(?:[/*·]{_UNIT})*[.,]?")
_CHOICE = re.compile(
    r"(?:.*\b(?i:is|answer|option|choice)\b:?\s*)?(?:\(([A-Ja-j])\)([\s.,:;].*)?|([A-J])(?:[.):](\W.*)?)?)", re.DOTALL
)
_DECIMAL = re.compile(
    r"([-+]?)\s*((?:\d{1,3}([, ])\d{3}(?:\3\d{3})*|\d+)(?:\.\d*)?|\.\d+|(?=10\s*\^))(?:st|nd|rd|th)?"
    r"(?:(?:\s*(?:\\times|\\cdot|[*x])\s*)?10\s*\^\s*\{?([-+]?\d{1,4})\}?|[eE]([-+]?\d{1,4}))?"
)
_MARKS = " .,;:!?*\"'()[]«»"
_QUOTIENT = re.compile(
    r"([-+]?)\s*(?:(\d*)\s*\\frac\{\s*(-?[\d.,]+)\s*\}\{\s*(-?[\d.,]+)\s*\}|(\d[\d,.]*)\s*/\s*(\d[\d,.]*))"
)
_REPEATING = re.compile(r"(-?)(\d*)\.(?:(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?|(\d*?)(\d+?)\6+\.\.\.)")
_GROUPS = re.compile(r"\(?\+?\d+(?:\.\d+)?\)?(?:(?:\s*(?:-|\bto\b)\s*|[. ])\(?\d+(?:\.\d+)?\)?)+")
_INTRODUCES = ("is", "are", "equals", "be", "was", "=", "exactly", "choose")
_RELATION = re.compile(r"<|>|\\(?:le|ge|ne|lt|gt)(?![a-z])")
_SET = re.compile(r"\[.*\)|\(.*\]|.*\\(?:cup|cap|setminus|infty|mathbb)(?![a-z]).*")
_EQUALS = re.compile(r"(?<![<>!\\:])=(?!=)|\\(?:approx|in)(?![a-z])")
_NAME = re.compile(
    r"\\?[A-Za-z]+'?(?:_\{?\w+\}?|\^\{-1\})?(?:\([^()]*\))?|(?:\\[a-z]+\s*)+[A-Za-z]{0,3}|\|[A-Z]{2}\||"
    r"\([a-z](?:\s*,\s*[a-z])*\)|[abmnpqrs](?:\s*\+\s*[abmnpqrs])+"
)
_OPEN, _CLOSE = r"([(\[{]|\\langle|\\begin\b)", r"([)\]}]|\\rangle|\\end\b)"
_BRACKETS = re.compile(r"[A-Z]?(\(|\[|\\?\{|\\langle)(.*?)(\)|\]|\\?\}|\\rangle)", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([a-z]?matrix)\}(.*?)(?:\\\\\s*)?\\end\{\1\}", re.DOTALL)
_CLAUSE = re.compile(
    r"\s+\((?=[a-z]{3})|[,;:]?\s+(?:because|since|when|where|if|which|while|given|as|rather|instead|but|so)\b|, not\b|;"
)
#: Words with which a number is not the answer itself, and those that may begin with a capital before one.
_NEGATES = re.compile(
    r"\b(?:not|never|neither|nor|cannot|without|least|most|than|between|under|over|above|below|nearly|almost|except|"
    r"wrong|incorrect|no way|doubt)\b|n't\b"
)
_STARTS = re.compile("so|thus|hence|therefore|then|exactly|about|only|just|total|answer|i")


class Value(NamedTuple):
    """An answer: its kind, what it is, its unit in words, and how it is written.

    kind: "number" (a `Fraction`), "expression" (of sympy), "region" (a set of sympy; the unit is its variable),
    "relation" (of sympy, in several variables), "equation" (its sides' difference), "named" (a name and a value),
    "sequence" (values; the unit is their brackets), "compound" (a quantity in several units), "choice" (a letter),
    "words"; and, with digits but not a number, "date" (all that it may be), "clock", "base", "groups".
    """

    kind: str
    content: Any
    unit: str = ""
    text: str = ""


def read(text: str) -> Value | None:
    """The value that a statement in `plain` spelling gives; None: it gives none, or several, or denies it."""
    text = re.sub(r"(?<=[a-z]{2})[.!?,;]+$|(?<!\.)[.?,;]$|(?<![\d.])\.+$", "", text.strip(' \t\n*_"')).strip()
    if not text or len(text) > 1000:
        return None
    if re.match("(?i)(?:yes|no),", text):
        return read(text.partition(",")[0])
    option = _CHOICE.fullmatch(re.sub("[«»]", "", _CLAUSE.split(text)[0]))
    if option and len({*re.findall(r"\(([A-J])\)", text)}) < 2:
        return Value("choice", (option[1] or option[3]).upper(), text=(option[2] or option[4] or "").strip(" .,:;\\"))
    tokens = text.split()
    runs = _runs(tokens)
    if runs == [(0, len(tokens))]:
        return _value(text) or _label(tokens)
    if len(runs) > 1:
        cuts = (cut.start() for cut in _CLAUSE.finditer(text))
        if cut := next((cut for cut in cuts if _runs(text[:cut].split())), 0):
            return read(text[:cut])
        if whole := _groups(text) or _compound(text):
            return whole
    said = [run for run in runs if re.search(r"[\d\\=+*/^<>]", " ".join(tokens[slice(*run)]))]
    said = said or [run for run in runs if run[1] == len(tokens) and _is_introduced(tokens, run[0])]
    if len(said) > 1:
        said = said[-1:] if _is_introduced(tokens, said[-1][0]) else []
    return _sentence(tokens, *said[0]) if said else None if re.search(r"\d", text) else _words(tokens)


def _sentence(tokens: list[str], start: int, end: int) -> Value | None:
    """The value of a sentence with one expression."""
    lead, tail = " ".join(tokens[:start]), _CLAUSE.split(" " + " ".join(tokens[end:]))[0]
    if _NEGATES.search(re.split("[,;]", lead)[-1]) or _NEGATES.search(tail):
        return None
    before = tokens[start - 1].strip(_MARKS) if lead and lead[-1] not in ":=" else ""
    if before[:1].isupper() and tokens[start] != "=" and not _STARTS.fullmatch(before.casefold()):
        return _label(tokens)
    start += tokens[start].casefold() in ("and", "or")
    value = _value(" ".join(tokens[start:end]))
    unit = " ".join(re.sub(r"[.,;:!?]+(?=[\s»]|$)|[«»]", "", re.split(r"\s(?:is|are|was|were)\b", tail)[0]).split())
    if value is None or value.kind not in ("number", "clock") or unit.casefold().replace(".", "") not in ("am", "pm"):
        return value and value._replace(unit=value.unit or unit)
    hour, *rest = value.content if value.kind == "clock" else (int(value.content), 0)
    return Value("clock", (hour % 12 + 12 * (unit[0] in "pP"), *rest), "m", value.text)


def _runs(tokens: list[str]) -> list[tuple[int, int]]:
    """Where tokens in a row are no prose: (start, end)."""
    before = ["", *tokens]
    groups = groupby(range(len(tokens)), lambda index: _is_prose(tokens[index], before[index]))
    runs = [list(group) for is_prose, group in groups if not is_prose]
    return [(run[0], run[-1] + 1) for run in runs]


def _is_prose(token: str, before: str) -> bool:
    if token.startswith("«") or (before[-1:].isdigit() and _MEASURE.fullmatch(token)):
        return True
    word = token.strip(_MARKS).casefold()
    if not re.sub("[-']", "", word).isalpha() or _MATHS.fullmatch(word):
        return False
    is_foreign, is_spoken = not word.isascii() and len(word) > 1, len(word) == 3 and not token.isupper()
    return bool(len(word) > 3 or is_foreign or _SHORT.fullmatch(word) or (is_spoken and re.search("[aeou]", word)))


def _is_introduced(tokens: list[str], index: int) -> bool:
    return index > 0 and (tokens[index - 1].endswith(":") or _word(tokens[index - 1]) in _INTRODUCES)


def _word(token: str) -> str:
    return token.strip(_MARKS).casefold()


def _label(tokens: list[str]) -> Value | None:
    """Words with digits, such as "Apollo 11" or "H2O"."""
    text = " ".join(map(_word, tokens))
    return Value("words", text) if re.search(r"(?:^| )[^\W\d_]", text) and not re.search(r"[\\=]", text) else None


def _words(tokens: list[str]) -> Value | None:
    has = ("has", "have")
    says = (i for i in range(1, len(tokens)) if _is_introduced(tokens, i) or _word(tokens[i - 1]) in has)
    tokens = tokens[max(says, default=0) :]
    spoken = _spoken([word for token in tokens if (word := _word(token))])
    if spoken is None and len(parts := _split(" ".join(tokens))) > 1:
        items = [_words(part.split()) for part in parts]
        return None if None in items else Value("sequence", items, "", " ".join(tokens))
    words = [re.sub("(?<=...)s$|^(?:the|an?)$", "", _word(token)) for token in tokens]
    return spoken or (Value("words", " ".join(filter(None, words))) if any(words) else None)


def _spoken(words: list[str]) -> Value | None:
    """A number in words, with its unit: "twenty-one apples", "two thirds"."""
    total, part, count = Fraction(0), Fraction(0), 0
    words = [piece for word in words for piece in word.split("-")] or [""]
    for count, word in enumerate((*words, ""), 1):  # noqa: B007  it is read behind the loop
        if word in _SPOKEN:
            part += _SPOKEN[word]
        elif word in _TIMES and part:
            total, part = (total, 100 * part) if word == "hundred" else (total + part * _TIMES[word], Fraction(0))
        elif word.removesuffix("s") in _PARTS and part:
            part /= _PARTS[word.removesuffix("s")]
        elif word != "and":
            break
    return Value("number", total + part, " ".join(words[count - 1 :])) if words[0] in _SPOKEN else None


def _value(text: str) -> Value | None:
    """The value of a text without prose."""
    text = re.sub(r"(?<!\.)\.$", "", text.lstrip(" ,;:=").rstrip(" ,;:"))
    readers = (_number, _shape, _groups, _region, _sequence, _equation, _expression)
    return next((value for reader in readers if (value := reader(text))), None)


def _number(text: str) -> Value | None:
    """A number as it is written when it is worked out."""
    if match := _DECIMAL.fullmatch(text):
        number = Fraction(re.sub("[, ]", "", match[2]) or 1) * Fraction(10) ** int(match[4] or match[5] or 0)
    elif match := _REPEATING.fullmatch(text):
        first, again = (match[3], match[4]) if match[4] else (match[5], match[6])
        number = (Fraction(match[2] + first or 0) + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(first)
    elif match := _QUOTIENT.fullmatch(text):
        try:
            top, bottom = (Fraction(part.replace(",", "")) for part in (match[3] or match[5], match[4] or match[6]))
            number = Fraction(match[2] or 0) + top / bottom
        except (ValueError, ZeroDivisionError):
            return None
    else:
        return None
    return Value("number", -number if match[1] == "-" else number, text=text)


def _shape(text: str) -> Value | None:
    """A date, a time or ratio, or a number in another base."""
    if match := re.fullmatch(r"(\d{4})-(\d{1,2})-(\d{1,2})", text):
        return Value("date", {(int(match[1]), int(match[2]), int(match[3]))}, text=text)
    if match := re.fullmatch(r"(\d{1,2})([/.])(\d{1,2})\2(\d{4})", text):
        one, two, year = int(match[1]), int(match[3]), int(match[4])
        return Value("date", {date for date in ((year, one, two), (year, two, one)) if date[1] <= 12}, text=text)
    if re.fullmatch(r"\d+(?:\s*:\s*\d+)+", text):
        return Value("clock", tuple(map(int, text.split(":"))), text=text)
    match = re.fullmatch(r"([\dA-Fa-f]+)_\{?(\d+)\}?", text)
    return match and Value("base", (match[1].upper(), match[2]), text=match[1])


def _groups(text: str) -> Value | None:
    """A range, a score or a telephone number."""
    parts = re.findall(r"\d+(?:\.\d+)?", text) if _GROUPS.fullmatch(text) else []
    is_long = len("".join(parts)) > 6
    return Value("groups", "".join(parts) if is_long else [*map(float, parts)], text=text) if parts else None


def _compound(text: str) -> Value | None:
    """A quantity in several units, such as "3 hours 20 minutes"."""
    parts = re.findall(r"([\d.]+)\s*([^\d\s,][^\d,]*?)(?:,|\band\b|\s)*(?=\d|$)", text)
    if len(parts) < 2 or re.sub(r"[\s,]|\band\b", "", text) != re.sub(r"\s", "", "".join(map("".join, parts))):
        return None
    values = [read(f"{number} {unit}") for number, unit in parts]
    return Value("compound", values, "several", text) if all(value and value.unit for value in values) else None


def _split(text: str) -> list[str]:
    """The items of a list, split where no bracket is open."""
    comma = r",(?!\d{3}(?!\d))" if re.search(r",\s", text) else ","
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"{_OPEN}|{_CLOSE}|{comma}|;|(?<![\w\\])(?:and|or)\b", text):
        depth += bool(match[1]) - bool(match[2])
        if not (match[1] or match[2] or depth):
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _sequence(text: str) -> Value | None:
    if r"\pm" in text:
        return _items([text.replace(r"\pm", "+"), text.replace(r"\pm", "-")], "", text)
    if len(parts := _split(text)) > 1:
        return _items(parts, "", text)
    if match := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in match[2].split(r"\\")]
        is_column = all(len(row) == 1 for row in rows)
        return _items([row[0] if is_column else f"({', '.join(row)})" for row in rows], "()", text)
    if match := _BRACKETS.fullmatch(text):
        form = (match[1] + match[3]).replace("\\", "").replace("langlerangle", "()")
        if len(parts := _split(match[2])) > 1 or (form == "{}" and parts):
            return _items(parts, form, text)
    return None


def _items(parts: list[str], form: str, text: str) -> Value | None:
    values = [Value("words", "...") if re.fullmatch(r"\\[lcd]?dots|\.\.\.", part) else _value(part) for part in parts]
    if None in values:
        return None
    return values[0] if len(values) == 1 else Value("sequence", values, form, text)


def _region(text: str) -> Value | None:
    """A set of numbers, given by inequalities or as intervals; or a relation of several variables."""
    text = re.sub(r"^\\?\{.*?(?::|\\mid(?![a-z])|\|)(.*?)\\?\}$", r"\1", text).strip()
    if not _RELATION.search(text):
        return _expression(text) if _SET.fullmatch(text) and not _EQUALS.search(text) else None
    from sympy import Intersection, Union

    relations = [parse(part) for part in _split(text)]
    if not all(hasattr(relation, "as_set") for relation in relations):
        return None
    names = {symbol.name for relation in relations for symbol in relation.free_symbols}
    if len(names) == 1:
        join = Union if re.search(r"\bor\b", text) else Intersection
        return Value("region", join(*(relation.as_set() for relation in relations)), names.pop(), text)
    is_relation = names and len(relations) == 1
    return Value("relation", relations[0], text=text) if is_relation else Value("words", re.sub(r"\s", "", text))


def _equation(text: str) -> Value | None:
    if match := re.fullmatch(r"(.*\S)\s*\\equiv\s*(-?\d+) mod (\d+)", text):
        return Value("words", f"{match[1]} is {int(match[2]) % int(match[3])} mod {match[3]}")
    parts = [part.strip() for part in _EQUALS.split(text)]
    if len(parts) < 2 or not all(parts):
        return None
    if len(parts) == 2 and _NAME.fullmatch(parts[1]) and _number(parts[0]):
        parts.reverse()
    if _NAME.fullmatch(parts[0]):
        value = _value(parts[-1])
        return value and Value("named", (re.sub(r"\s", "", parts[0]), value), text=text)
    sides = [parse(part) for part in parts]
    is_number = [not getattr(side, "free_symbols", True) for side in sides]
    if is_number[-1] and any(is_number[:-1]):
        return _value(parts[-1])
    is_equation = len(parts) == 2 and all(hasattr(side, "as_numer_denom") for side in sides)
    return Value("equation", sides[0] - sides[1], text=text) if is_equation else None


def _expression(text: str) -> Value | None:
    if re.search(r"«|\.\.\.|[^\W\d_]{4,}", re.sub(r"\\[A-Za-z]+", "", text)):
        return None
    from sympy import Expr, Set

    expression = parse(text)
    kind = "expression" if isinstance(expression, Expr) else "region" if isinstance(expression, Set) else ""
    return Value(kind, expression, text=text) if kind else None


def parse(text: str) -> Any:
    """A whole LaTeX text as sympy's, by math-verify's parser; None: it does not parse. Decimals are exact, and i is the
    imaginary unit where no other letter is."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from sympy import Float, I, Rational, Symbol

    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    letters = ConversionConfig(lowercase_symbols=False)
    text = re.sub(r"(?<=[A-Za-z])'+", lambda match: f"_{{{'p' * len(match[0])}}}", text)
    try:
        parsed = latex2sympy(text, is_real=True, normalization_config=spelling, conversion_config=letters)
        symbols = {symbol: Symbol(symbol.name, real=True) for symbol in parsed.free_symbols}
        if {symbol.name for symbol in symbols} == {"i"}:
            symbols = dict.fromkeys(symbols, I)
        return parsed.xreplace(symbols | {number: Rational(str(number)) for number in parsed.atoms(Float)})
    except Exception:  # whatever an unfinished text raises there
        return None
