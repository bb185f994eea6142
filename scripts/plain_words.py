"""Refuse words and phrases for which this project has plain ones.

    python scripts/plain_words.py [FILE ...]      # the package, the documentation and the examples

To add one, write it into WORDS with what to use instead. A word also counts as a part of an identifier (`_is_told`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: A regular expression, without regard to case, and what to write instead.
WORDS = {
    "told": "reported, passed, notified, given",
    "patient": "with_deadline",
    "recall": "replay",
    "strangers?": "unauthenticated peer, unknown process",
    "Door": "listener",
    "whoever": "the caller, or the name of the part",
    "takes? turns": "mutually exclusive",
    "nobody has read": "untrusted",
    "of its own accord": "by itself",
    "for ever": "forever, or without end",
    "verbs?": "call, or the method's name",
    "slots? (?:on|of) (?:the|a) (?:GPU|Ray|cluster|rank)": "device, rank",
    "map of placement": "placement",
}
ANY_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("verl", "docs", "examples")
SUFFIXES = (".py", ".cpp", ".h", ".md", ".yaml")
#: The history is left as it was written.
LEFT_OUT = ("docs/log.md",)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, what stands there, what to write instead) of each banned word."""
    for number, line in enumerate(text.splitlines(), 1):
        if ANY_WORD.search(line) is None:  # most lines
            continue
        for word, better in WORDS.items():
            for match in re.finditer(rf"(?<![a-z])(?:{word})(?![a-z])", line, re.IGNORECASE):
                yield number, match[0], better


def files() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SUFFIXES and not str(file.relative_to(ROOT)).startswith(LEFT_OUT):
                yield file


def main() -> None:
    count = 0
    for file in [Path(name).resolve() for name in sys.argv[1:]] or files():
        for number, word, better in faults(file.read_text(encoding="utf-8")):
            shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            print(f"{shown}:{number}: '{word}': write {better}")
            count += 1
    if count:
        sys.exit(f"{count} banned words; the list is in scripts/plain_words.py")


if __name__ == "__main__":
    main()
