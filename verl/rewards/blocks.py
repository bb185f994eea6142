"""The program in a response: blocks of code between fences, as Markdown has them."""

from __future__ import annotations

import re
from collections.abc import Collection

from verl.data.text import behind_thoughts

#: Marks before a fence: of list items and quotations.
_MARKS = r"(?:[ \t>]|[-*+][ \t]|\d{1,9}[.)][ \t])*"
_FENCE = re.compile(rf"(?P<before>{_MARKS})(?P<fence>`{{3,}}|~{{3,}})(?P<label>.*)")
#: A fence that begins a block behind text in its line: a language or nothing follows it.
_LATE_FENCE = re.compile(r"(?<!`)(?P<fence>`{3,})(?P<label>[ \t]*[\w+#-]*\s*)$")
#: As Python has them: others, such as a form feed, may stand within a text of the program.
_LINE_END = re.compile(r"\r\n?|\n")
_INLINE = re.compile(r"(?<!`)(`{3,})[^`]+\1(?!`)")
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = ("py", "py3", "python", "python2", "python3", "ipython")
#: A fence that is so much further in than the one before is part of the block.
_FURTHER_IN = 4


def extract_code(response: str, names: Collection[str] = ()) -> str:
    """The program of a response: its last block that is labelled as Python, else the last without a label, else the
    last of any, else all of the response. Blocks that define one of `names` come before those that do not. Thoughts
    count only where nothing else has a block."""
    answer = behind_thoughts(response)
    blocks = code_blocks(answer) or code_blocks(response)
    if not blocks:
        return answer

    def rank(block: tuple[str, str]) -> tuple[bool, bool, bool]:
        label, text = block
        return any(_defines(text, name) for name in names), label in _PYTHON, not label

    return max(reversed(blocks), key=rank)[1]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case or "", content) of each fenced block.

    Fences are of backticks or tildes, also in list items, in quotations and behind text. Content loses the indentation
    of its fence. A block without an end goes on to the next fence with a language, or to the end of the text.
    """
    blocks: list[tuple[str, list[str]]] = []
    opened: re.Match[str] | None = None
    for line in _LINE_END.split(text):
        fence = _FENCE.fullmatch(line) if opened is None else _ends(opened, line)
        if opened is None and (fence is None or (fence["fence"][0] == "`" and "`" in fence["label"])):
            fence = _LATE_FENCE.search(_INLINE.sub("", line))
        if fence is None:
            if opened is not None:
                outside = len(line) - len(line.lstrip(" \t>"))
                blocks[-1][1].append(line[min(outside, _indent(opened)) :])
            continue
        language = _LANGUAGE.match(fence["label"])
        if opened is None or fence["label"].strip():
            blocks.append((language[1].casefold() if language else "", []))
            opened = fence
        else:
            opened = None
    if opened is not None and blocks[-1][1] and blocks[-1][1][-1].strip() in ("`", "``", "~", "~~"):
        blocks[-1][1].pop()  # a closing fence that was cut off
    return [(language, "\n".join(lines)) for language, lines in blocks]


def _ends(opened: re.Match[str], line: str) -> re.Match[str] | None:
    """The fence that ends a block, if this line is one."""
    fence = _FENCE.fullmatch(line)
    if fence is None or not fence["fence"].startswith(opened["fence"]):
        return None
    return fence if len(fence["before"]) < _indent(opened) + _FURTHER_IN else None


def _indent(fence: re.Match[str]) -> int:
    """Characters before a fence; behind text in its line, none."""
    return len(fence.groupdict().get("before", ""))


def _defines(text: str, name: str) -> bool:
    return re.search(rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}\b[^=\n]*=[^=]",
                     text, re.MULTILINE) is not None  # fmt: skip
