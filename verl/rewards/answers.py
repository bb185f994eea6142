"""Where a text has its answer, in one spelling of its signs."""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import normalize

from verl.data.text import behind_thoughts

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_MONTH = rf"({'|'.join(_MONTHS)})(?:uary|ruary|ch|il|e|y|ust|t|tember|ober|ember)?\.?"
_DAY, _YEAR = r"(\d{1,2})(?:st|nd|rd|th)?", r"(?:,? (\d{4}))?(?![\w/])"
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
#: Signs, and in the same order what they mean.
_UNICODE = "\u2044\u2212\u2013\u2019\u201c\u201d\u3002×÷·≤≥≠≈∞π±∪∩∈∅∖θ"
_MEANINGS = (
    r"""/ - - ' " " . \times / \cdot \le \ge \ne \approx \infty \pi \pm \cup \cap \in \emptyset \setminus \theta"""
)
_TABLE = {
    ord(sign): f"{text} " if text[0] == "\\" else text for sign, text in zip(_UNICODE, _MEANINGS.split(), strict=True)
}


def _words(match: re.Match[str]) -> str:
    """Text within LaTeX: its words are marked, so that none is taken for a product of letters."""
    words = re.sub(r"(?<![\w\d])(?!(?:and|or|[eid])\b)[^\W\d_][^\s(){}]*", r"«\g<0>»", match[1])
    return f" {words}{match[2] or ''} "


#: What Unicode, Markdown, programs and words have for LaTeX, in order.
_SIGNS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Nothing: what a calculator wrote, pictures, and what is between thousands.
    (r"<<[^<>]*>>|\\!|[`\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]", ""),
    (r"(?<=\d)(?:\\[,;: ]|[\u2009\u202f\xa0]|\{,\})(?=\d{3}(?!\d))", ""),
    (r"\$\$((?s:.+?))\$\$|(?<!\\)\$(?!\s)((?:\\\$|[^$\n])+?)(?<![\s\\])\$(?!\d)", r"\1\2"),
    (r"[\u2070\xb9\xb2\xb3\u2074-\u2079\u207b]+", lambda match: f"^{{{normalize('NFKC', match[0])}}}"),
    (r"(?<=\d)[\xbc-\xbe\u2150-\u215e]", r" \g<0>"),
    (r"(?s).+", lambda match: normalize("NFKC", match[0]).translate(_TABLE)),
    # LaTeX in one spelling.
    (r"(?<!\\)\\(?:[()\[\],;: ]|q?quad(?![a-z]))|~", " "),
    (r"(?s)\\begin\{.*?\\end\{", lambda match: match[0].replace("\n", " ")),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))", r"\\frac{\1\2}{\3\4}"),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"(?:[(\[]\s*)?\\begin\{(?:array|matrix)\}(?:\{[^{}]*\})?(.*?)\\end\{(?:array|matrix)\}\s*[)\]]?",
     r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"<=|\\leq(?:slant)?(?![a-z])", r"\\le "),
    (r">=|\\geq(?:slant)?(?![a-z])", r"\\ge "),
    (r"(?<!\d)!=|\\neq(?![a-z])", r"\\ne "),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r" ?\(?\\?p?mod(?![a-z])\s*\{?(\d+)\}?\)?", r" mod \1"),
    # LaTeX for what is plain.
    (r"(?<![\w/.^])(\d+) (\d+)/(\d+)(?![\w/]|\.\d)", r"\1\\frac{\2}{\3}"),
    (r"(?:\u221a|(?<!\\)sqrt)\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]\b))", r"\\sqrt{\1\2}"),
    (r"(?<![\w)*])\*\*(?=\S)([^*\n]+)(?<=\S)\*\*(?![\w(*])|(?<![\w_])__(?=\S)([^_\n]+)__(?!\w)", r"\1\2"),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    (r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)h?|pi|theta|alpha|beta|sec|csc|cot|log|ln|exp|sqrt)(?![A-Za-z])",
     r"\\\1 "),
    (r"(?<![\\A-Za-z])[iI]nfinity(?![A-Za-z])", r"\\infty "),
    (r"\b(?:negative|minus) (?=[\d\\])", "-"),
    (rf"\b{_MONTH} {_DAY}{_YEAR}", lambda m: f"{int(m[3] or 0):04}-{_MONTHS.index(m[1]) + 1:02}-{int(m[2]):02}"),
    (rf"\b{_DAY}(?: of)? {_MONTH}{_YEAR}",
     lambda m: f"{int(m[3] or 0):04}-{_MONTHS.index(m[2]) + 1:02}-{int(m[1]):02}"),
    (r"(?<=\d) to (?=\d)", "-"),
    # Words and units are marked.
    (r"(?:\^\{?\\circ\}?|°)\s*(?:\\(?:text|mathrm)\s*\{\s*([CF])\s*\}|([CF])(?![a-z]))?", r" «deg\1\2» "),
    (r"\\(?:mathbf|boldsymbol|textbf)\s*\{([^{}]*)\}|(?<=\{)\\(?:text|mathrm)\s*\{([^{}]*)\}|\\text\s*\{(\([A-J]\))\}",
     r"\1\2\3"),
    (r"\\(?:text(?:rm|it|normal)?|mathrm|mbox)\s*\{([^{}]*)\}(\^\{?-?\d\}?)?", _words),
    (r"(-?)\\?([$€£])\s?(\.?\d(?:[\d.,]*\d)?)", r"\1\3 «\2»"),
    (r"«deg»\s+(\d+)'(?!')", r"«deg» \1 «arcminutes»"),
    (r"\\?%|(?<=\d)\s*per\s?cent(?:age)?(?!\w)", " «%» "),
    (r"\\?\$(?!»)", " «$» "),
    (r"(?<=\d)((?: «[$€£]»)?) (hundred|thousand|million|billion|trillion)s?\b", lambda m: f"e{_POWERS[m[2]]}{m[1]}"),
    (r"(?<=\d)\s*([ap])\.?\s?m(?:\.|\b)", r" \1m"),
    (r"(?i)«?\ball»? «?real(?:»? «?number)?s»?", r"\\mathbb{R}"),
    (r"(\\mathbb\{R\}),? (?:except|other than|but)(?: for)? (?:[a-z]\s*=\s*)?([^\s.]+)", r"\1 \\setminus \\{\2\\}"),
    (r"\bnot [^.,;]{1,30}?,? but (?:rather )?", ""),
    (r"(?m)\bDNE\b|^.*\bdoes(?: not|n't) exist\b.*", "does not exist"),
)  # fmt: skip
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: Between two boxes that are parts of one answer, and a unit behind a box.
_JOINS = re.compile(r"[\s$]*(?:,|;|,?\s*(?:and|or)\b)?[\s$]*(?:\(?\w\)\s*)?(?:\w{1,3}\s*(?:=|\\in|\\approx)\s*)?")
_BEHIND = re.compile(r"\$?\s*((?:\\?%|\^\{?\\circ\}?|°|\\(?:text|mathrm)\s*\{[^{}]*\}|[kcm]?m\b|k?g\b)[^\s$.,]*)")
#: The mark before the answer in GSM8K, and what makes its line a heading instead.
_MARK = re.compile(r"####[^\S\n]*([^\n]*)\n?")
_HEADING = re.compile(r"(?i)(?:step\b|part\b|\d+[.)]\s).*|[^\d\\]*(?:answer|solution|result|conclusion|\s|:)[^\d\\]*")
_SAYS = re.compile(
    r"(?im)\banswers?\b(?:[^\n.:=]|\.\d){0,80}?(?:\b(?:is|are)\b|[:=])[\s:]*(?=\S)|"
    r"^[#*\s]*(?:the )?(?:final )?answer[#*\s:]*$"
)
_DENIES = re.compile(r"(?:\bnot|n't|\bnever)\b[^.,;:\n]*$")
_SENTENCE = re.compile(r"(?<=[\w)}\]»%][.!?])(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<!\b[A-Z][a-z]{2}\.)\s+(?=[A-Z(\\«])")


def plain(text: str) -> str:
    """A text in which Unicode, Markdown, money, dates and text within LaTeX have one spelling."""
    for sign, latex in _SIGNS:
        text = re.sub(sign, latex, text)
    return text.strip()


def answer_in(text: str) -> str:
    """The answer in a text, in one spelling; "": there is no answer. It is, after the thoughts: the last
    `<answer>`; in it the last `\\boxed{}`, with those that it is joined to ("x = \\boxed{1} and y = \\boxed{2}"); or
    what follows `####`; or what follows "the answer is"; or the last line."""
    text = behind_thoughts(text)
    text = (_TAG.findall(text) or [text])[-1]
    if spans := boxes(text):
        first = len(spans) - 1
        while first and _JOINS.fullmatch(text, spans[first - 1][1] + 1, spans[first][0]):
            first -= 1
        unit = _BEHIND.match(text, spans[-1][1] + 1)
        inside = ", ".join(content for *_, content in spans[first:])
        return plain(inside + (f" {unit[1]}" if unit else ""))
    if marks := list(_MARK.finditer(text)):
        rest = text[marks[-1].end() :].strip()
        text = rest if rest and _HEADING.fullmatch(marks[-1][1]) else marks[-1][1]
    text = plain(text)
    if says := list(_SAYS.finditer(text)):
        behind = text[says[-1].end() :].strip().partition("\n")[0]
        return "" if _DENIES.search(text[: says[-1].start()]) else _SENTENCE.split(behind)[0]
    lines = [line for line in text.splitlines() if re.search(r"\w", line)]
    sentences = _SENTENCE.split(lines[-1]) if lines else [""]
    return next((each for each in reversed(sentences) if re.search(r"[\d\\=]", each)), " ".join(sentences))


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Where each `\\boxed{}` begins and ends, and the text between its balanced braces."""
    starts: list[re.Match[str]] = []  # of the braces that are open
    spans = []
    for match in re.finditer(r"(\\f?box(?:ed)?\s*)?\{|\}", text):
        if match[0] != "}":
            starts.append(match)
        elif starts and (start := starts.pop())[1]:
            spans.append((start.start(), match.start(), text[start.end() : match.start()]))
    return sorted(spans)
