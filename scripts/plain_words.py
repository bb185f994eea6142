"""Refuse words and phrases for which the field has plain ones.

    python scripts/plain_words.py [FILE ...]      # the package, the documentation and the examples
    python scripts/plain_words.py --sentences [FILE ...]      # of pages: the lengths of sentences, and the ten longest
    python scripts/plain_words.py --dialect [FOLDER]      # sentences of docstrings that do not read like the field's

To add one, write it into WORDS with what to use instead. A word also counts as a part of an identifier (`_is_told`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

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
    "lend(?:s|ing)?": "publish, share, release_weight",
    "spread_weights": "broadcast_shards",
    "settle_engine": "resolve_engine",
}
#: Names of variables that say nothing of what they hold, which the package does not have. (Tests may.)
NAMES = {
    "found": "what it is: rewards, matches, by_rank",
    "given": "what it is: settings, arguments, handles",
    "own": "local, this rank's, the policy's",
    "at": "offset, index, position",
    "made": "what it is: actor_class, record, guard",
    "place": "context, position, offset, address",
}
#: What this project's docstrings used to say instead of the field's idiom. A match is a place to look at.
DIALECT = {
    "noun clause": r"\b(?:all|and|as|by|for|from|in|of|on|than|that|what|with)\s+what\s+"
    r"(?:a|each|had|has|is|it|no|one|the|they|was)\b|(?:^|\. )What (?:a|each|has|is|it|no|of|the|they|was)\b",
    "those of": r"\bth(?:at|ose) of\b",
    "stands": r"\bstands?\b(?! for)",
    "beside": r"\bbeside\b",
    "there is none": r"\bthere is none\b|\bwhere there (?:is|are) no(?:ne)?\b",
    "is none": r"\b(?:are|has|have|is) none\b",
    "is of": r"\b(?:are|is|was|were) of (?:a|an|its|one|that|the|their|this)\b",
    "Of a ...": r"(?:^|\. )Of (?:a|an|each|several|that|the|those|what)\b",
    "so many": r"\bso many\b",
    "anew": r"\banew\b",
    "in the place of": r"\bin its place\b|\bin the place of\b",
    "as they say": r"\bas (?:it|they) (?:say|stand)s?\b",
}
#: The most sentences of docstrings in it. It only falls: whoever lowers the count lowers this.
MOST_DIALECT = 38
ANY_WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("verl", "docs", "examples")
SUFFIXES = (".py", ".cpp", ".h", ".md", ".yaml")
#: The history is left as it was written.
LEFT_OUT = ("docs/log.md",)
#: Pages whose sentences are short: a median of at most 18 words, 95 % under 32. All but what the history says, and what
#: commands write.
GUIDES = (
    "README.md",
    *sorted(
        name
        for page in (ROOT / "docs").glob("*.md")
        if (name := f"docs/{page.name}") not in (*LEFT_OUT, "docs/config.md", "docs/api.md", "docs/gpu_results.md")
    ),
)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, what stands there, what to write instead) of each banned word."""
    for number, line in enumerate(text.splitlines(), 1):
        if ANY_WORD.search(line) is None:  # most lines
            continue
        for word, better in WORDS.items():
            for match in re.finditer(rf"(?<![a-z])(?:{word})(?![a-z])", line, re.IGNORECASE):
                yield number, match[0], better


def named_faults(source: str) -> Iterator[tuple[int, str, str]]:
    """The same of each variable, parameter or field of a Python file that is called one of `NAMES`."""
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name in NAMES:
            yield node.lineno, name, NAMES[name]  # type: ignore[attr-defined]


def dialect(folder: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """(file, sentence, the patterns of `DIALECT` that it matches) of each sentence of the docstrings in a folder."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            for part in re.split(r"(?<=[.:;!?])\s+|\n\s*\n", text or ""):
                sentence = " ".join(part.split())
                if len(part.split()) > 2:
                    yield file, sentence, [name for name, form in DIALECT.items() if re.search(form, sentence)]


def show_dialect(folder: Path) -> int:
    """Print the sentences in dialect and their share; returns their number."""
    sentences = list(dialect(folder))
    matches = [row for row in sentences if row[2]]
    for file, sentence, names in matches:
        print(f"{file}: {sentence[:140]}  [{', '.join(names)}]")
    print(f"{len(matches)} of {len(sentences)} sentences of docstrings: {len(matches) / max(1, len(sentences)):.1%}")
    return len(matches)


def files() -> Iterator[Path]:
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SUFFIXES and not str(file.relative_to(ROOT)).startswith(LEFT_OUT):
                yield file


def sentences(text: str) -> list[str]:
    """The sentences of a page of Markdown, longest first: code, tables and addresses are left out."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#.*$|^\|.*$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\"'(])|\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )| \| |\|\n|·", text)
    words = [part.strip(" |\n-*").split() for part in parts]
    return sorted((" ".join(one) for one in words if len(one) > 1), key=lambda one: -len(one.split()))


def show_sentences(names: list[str]) -> None:
    """The median length, the share under 32 words, and the ten longest of each page."""
    for name in names or GUIDES:
        each = sentences((ROOT / name).read_text(encoding="utf-8"))
        lengths = [len(one.split()) for one in each]
        share = sum(length < 32 for length in lengths) / len(lengths)
        print(f"{name}: {len(each)} sentences, median {median(lengths):g} words, {share:.0%} under 32")
        print("".join(f"  {len(one.split()):3}  {one[:100]}\n" for one in each[:10]), end="")


def main() -> None:
    if sys.argv[1:2] == ["--sentences"]:
        return show_sentences(sys.argv[2:])
    if sys.argv[1:2] == ["--dialect"]:
        if show_dialect(Path(sys.argv[2] if sys.argv[2:] else ROOT / "verl")) > MOST_DIALECT:
            sys.exit(f"more than {MOST_DIALECT}, which was reached before: write these as the field does")
        return None
    count = 0
    for file in [Path(name).resolve() for name in sys.argv[1:]] or files():
        text = file.read_text(encoding="utf-8")
        shown = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
        for number, word, better in (*faults(text), *(named_faults(text) if file.suffix == ".py" else ())):
            print(f"{shown}:{number}: '{word}': write {better}")
            count += 1
    if count:
        sys.exit(f"{count} banned words; the list is in scripts/plain_words.py")


if __name__ == "__main__":
    main()
