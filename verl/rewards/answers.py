"""What an answer in words says: the expression in a sentence, a number with its unit, or a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from unicodedata import normalize

from verl.data.text import behind_thoughts

#: What precedes the answer in GSM8K.
_MARK = "####"
#: Words that belong to an expression.
_MATHS = ("and", "or", "sqrt", "frac", "infinity", "infty", "mod", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
#: Words of a sentence that are as short as the names of variables.
_SHORT = """
the is are was has not yes no so we he she it its at by an as be if of on to in for per all you who one two six ten day
age sum
"""
#: Words with a value, and those that multiply the number before them.
_VALUES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "third", "quarter")
_UNIT = (
    r"(?:[mµnkMG]?(?:m|g|s|l|L|W|J|N|V|A|Pa|Hz|eV|Wh)|[cd]m|hr?|min|sec|ft|in|yd|mi|lb|oz|mol|k?cal|[mk]ph|rpm|K|°[CF])"
    r"(?:\^?\{?-?\d\}?)?"
)
_NUMBER = r"([-+]?\$?[\d.,]*\d(?:\s*(?:\\times|\\cdot|[×*])\s*10\^\{?-?\d+\}?)?)"
#: A number and its unit. A lone letter is a variable, but for a square metre: 5 m is five times m.
_MEASURE = re.compile(rf"{_NUMBER}\s*(?!\w(?:\s|\^|$))({_UNIT}(?:\s*[/*·]\s*{_UNIT})*)|{_NUMBER} m\^?[23]")
#: Names that LaTeX has as commands, and a number with a power of ten, as programs write them.
_PLAIN = re.compile(r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln)(?![A-Za-z])")
_POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: Between two boxes that are parts of one answer.
_JOINS = re.compile(r"[\s$]*(?:,|;|,?\s*(?:and|or)\b)?[\s$]*(?:\(?\w\)\s*)?(?:\w{1,3}\s*(?:=|\\in|\\approx)\s*)?")
#: What Unicode and Markdown have for LaTeX, in order.
_SIGNS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=\d)(?:\\[,;: !]|[\u2009\u202f\xa0])(?=\d{3}(?!\d))", ""),  # a space between thousands
    (r"[\u2070\xb9\xb2\xb3\u2074-\u2079\u207b]+", lambda match: f"^{{{normalize('NFKC', match[0])}}}"),
    (r"[\xbc-\xbe\u2150-\u215e]", lambda match: f" {normalize('NFKC', match[0])}"),
    ("(?s).*", lambda match: normalize("NFKC", match[0])),
    ("\u2044", "/"),
    (r"(?<![\w/.])(\d+) (\d+)/(\d+)(?![\w/.])", r"(\1+\2/\3)"),
    (r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}"),
    (r"(?<![\w)*])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w(*])", r"\1"),
    (r"\\(?:mathbf|boldsymbol|textbf)\s*\{([^{}]*)\}", r"\1"),
    (r"\\text\s*\{(\([A-J]\))\}", r"\1"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
)
_CHOICE = re.compile(
    r"(?:.*\b(?:is|answer|option|choice)\b:?\s*)?(?:\(([A-J])\)|([A-J])[.):])(?:\W.*)?|\(?([A-J])\)?", re.DOTALL
)
_INTRODUCES = ("is", "are", "equals", "be", "was", "=")
_MARKS = " .,;:!?*\"'()[]"


def after_mark(text: str) -> str:
    """The line behind the last "####" of a text, or all of it."""
    return text.rpartition(_MARK)[2].strip().partition("\n")[0] if _MARK in text else text


def conclusion(text: str) -> str:
    """Where a text has its answer: what follows its thoughts; within that the last `<answer>`; within that the last
    `\\boxed{}`, with those that it is joined to ("x = \\boxed{1} and y = \\boxed{2}"), and what stands around them."""
    text = behind_thoughts(text)
    for sign, latex in _SIGNS:
        text = re.sub(sign, latex, text)
    if answers := _ANSWER.findall(text):
        text = answers[-1]
    start = 0
    for (_, end), (begin, _) in pairwise(_spans(text)):
        if not _JOINS.fullmatch(text, end + 1, begin):
            start = end + 1
    return text[start:].lstrip("$") if start else text


def boxes(text: str) -> list[str]:
    """The contents of each `\\boxed{}`, with their braces balanced; one that is not closed has none."""
    return [text[text.index("{", begin) + 1 : end] for begin, end in _spans(text)]


def _spans(text: str) -> list[tuple[int, int]]:
    """Where each `\\boxed{` begins, and its closing brace."""
    spans = []
    for start in re.finditer(r"\\boxed\s*\{", text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            spans.append((start.start(), end - 1))
    return spans


def choice(text: str) -> str | None:
    """The letter of an option: of "C", "(C) Paris" or "The answer is C. Paris"."""
    option = _CHOICE.fullmatch(text.strip())
    return option and (option[1] or option[2] or option[3])


def expression(text: str) -> str | None:
    """The one expression in a text without LaTeX's dollars and boxes; None: it has none, or several of which none is
    introduced as the answer ("5 apples and 3 pears")."""
    tokens = text.strip(" \n*").rstrip(" .,;").split()
    if any(_word(token) in _SCALES for token in tokens):
        return None
    runs: list[tuple[int, list[str]]] = []
    for index, token in enumerate(tokens):
        if not _is_prose(token):
            if runs and runs[-1][0] + len(runs[-1][1]) == index:
                runs[-1][1].append(token)
            else:
                runs.append((index, [token]))
    if len(runs) == 1 and len(runs[0][1]) == len(tokens):
        return _as_latex(" ".join(tokens))
    answers = [(index, run) for index, run in runs if _says(tokens, index, run)]
    if len(answers) > 1:
        answers = [answers[-1]] if _is_introduced(tokens, answers[-1][0]) else []
    if not answers:
        return None
    run = answers[0][1]
    while run[0].casefold() in ("and", "or"):
        run = run[1:]
    return _as_latex(" ".join(run).strip(" ,;:")) or None


def amount(text: str) -> str | None:
    """The number of a number with a unit."""
    measure = _MEASURE.fullmatch(text.strip())
    return measure and (measure[1] or measure[3])


def words(text: str) -> str | None:
    """The answer of a text that is words alone, in lower case; None: it is more or less than that."""
    tokens = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 ", text).split()
    start = max((index + 1 for index in range(len(tokens)) if _is_introduced(tokens, index + 1)), default=0)
    answer = [_word(token) for token in tokens[start:] if _word(token)]
    plain = all(re.fullmatch(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*", word) for word in answer)
    valued = not {*_SCALES, *_VALUES.split()}.isdisjoint(answer)
    return " ".join(answer) if answer and plain and not valued else None


def _as_latex(text: str) -> str:
    return _POWER.sub(r"\1 \\times 10^{\2}", _PLAIN.sub(r"\\\1 ", text))


def _word(token: str) -> str:
    return token.strip(_MARKS).casefold()


def _is_prose(token: str) -> bool:
    word = token.strip(_MARKS)
    if not word.replace("-", "").replace("'", "").isalpha() or word.casefold() in _MATHS:
        return False
    return len(word) > 3 or word.casefold() in _SHORT.split() or (len(word) == 3 and word.istitle())


def _is_introduced(tokens: list[str], index: int) -> bool:
    return index > 0 and (tokens[index - 1].endswith(":") or _word(tokens[index - 1]) in _INTRODUCES)


def _says(tokens: list[str], index: int, run: list[str]) -> bool:
    """Whether a run of tokens is an expression, and no article or name in a sentence."""
    return any(re.search(r"[\d\\=+*/^<>]", token) for token in run) or (
        index + len(run) == len(tokens) and _is_introduced(tokens, index)
    )
