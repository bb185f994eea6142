"""CodeBLEU: how much a Python program is like a reference, by its words, its syntax and its flow of data.

Ren et al., "CodeBLEU: a Method for Automatic Evaluation of Code Synthesis" (arXiv:2009.10297). The program is
read, never run.

Deviations from the paper's script:

- Words are Python's own tokens, not text between blanks; text that is not Python is cut by a pattern.
- Syntax and data flow come from Python's `ast`, not from tree-sitter; a program that does not parse has neither.
- A pair of variables counts as one edge of the flow however often it occurs; names stand for their order of appearance.
- Where the reference has no flow of data, the other three parts share its weight.
"""

from __future__ import annotations

import ast
import io
import keyword
import math
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl._base.checked import checked
from verl._base.syntax import syntax_tree
from verl.errors import ConfigError, shown
from verl.rewards.code import extract_code
from verl.rewards.functions import FunctionReward

_SKIPPED = (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_WORD = re.compile(r"\w+|[^\w\s]")
#: Longest run of words that is compared.
_ORDER = 4
#: Weight of a word that is no keyword, where a keyword has 1.
_OTHER = 0.2
#: Counts as the matches of a length without any (smoothing of Chen and Cherry, 2014, method 1).
_EPSILON = 0.1


class CodeBleuReward(FunctionReward):
    """CodeBLEU of the response's program and the row's column `reference`, from 0 to 1; a row without one abstains.

    Its four parts are components. The program is the one that `CodeReward` would run.

    Args:
        weights: of n-grams, weighted n-grams, syntax and flow of data; they sum to 1.
        timeout: seconds for all samples of a call.
        **options: see `FunctionReward`.

    Raises:
        ConfigError: there are not four weights of at least 0 that sum to 1.
    """

    one_of: ClassVar[tuple[str, ...]] = ("reference",)
    judges: ClassVar[str | None] = "last_turn"

    @checked
    def __init__(
        self,
        *,
        weights: Sequence[float] = (0.25, 0.25, 0.25, 0.25),
        **options: Any,
    ) -> None:
        super().__init__(_Likeness(tuple(map(float, weights))), **{"name": "codebleu", **options})
        if len(weights) != 4 or min(weights) < 0 or not math.isclose(sum(weights), 1.0):
            raise ConfigError(
                f"reward '{self.name}': weights are four numbers of at least 0 that sum to 1, not {shown(weights)}"
            )


@dataclass(frozen=True)
class _Likeness:
    """The reward function of `CodeBleuReward`."""

    weights: tuple[float, ...]

    def __call__(self, texts: list[str], reference: list[str | None]) -> list[dict[str, float] | None]:
        return [
            None if wanted is None else codebleu(extract_code(text), wanted, self.weights)
            for text, wanted in zip(texts, reference, strict=True)
        ]


def codebleu(program: str, reference: str, weights: Sequence[float] = (0.25,) * 4) -> dict[str, float]:
    """`score`, and its parts `ngrams`, `weighted_ngrams`, `syntax` and `dataflow`, each from 0 to 1."""
    words, wanted = _words(program), _words(reference)
    tree, wanted_tree = _parsed(program), _parsed(reference)
    values: dict[str, float | None] = {
        "ngrams": _bleu(words, wanted, {}),
        "weighted_ngrams": _bleu(words, wanted, dict.fromkeys(keyword.kwlist, 1.0)),
    }
    parts: Callable[[ast.AST], Iterable[Any]]
    for name, parts in (("syntax", _subtrees), ("dataflow", _flow)):
        needed = Counter(parts(wanted_tree))
        values[name] = sum((needed & Counter(parts(tree))).values()) / needed.total() if needed else None
    known = [(value, weight) for value, weight in zip(values.values(), weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    score = sum(value * weight for value, weight in known) / total if total else 0.0
    return {"score": score, **{name: value for name, value in values.items() if value is not None}}


def _words(program: str) -> list[str]:
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(program).readline))
    except (tokenize.TokenError, SyntaxError):
        return _WORD.findall(program)
    return [token.string for token in tokens if token.type not in _SKIPPED and token.string]


def _bleu(words: Sequence[str], wanted: Sequence[str], weights: dict[str, float]) -> float:
    """BLEU up to four words (Papineni et al., 2002); with weights, single words count by theirs."""
    if not words or not wanted:
        return 0.0
    logs = []
    for size in range(1, min(_ORDER, len(words), len(wanted)) + 1):
        here, there = (Counter(zip(*(text[i:] for i in range(size)), strict=False)) for text in (words, wanted))
        by = {run: weights.get(run[0], _OTHER) if weights and size == 1 else 1.0 for run in here}
        matched = sum(min(count, there[run]) * by[run] for run, count in here.items())
        total = sum(count * by[run] for run, count in here.items())
        logs.append(math.log((matched or _EPSILON * min(by.values())) / total))
    brevity = min(0.0, 1 - len(wanted) / len(words))
    return math.exp(brevity + math.fsum(logs) / len(logs))


def _parsed(program: str) -> ast.Module:
    try:
        return syntax_tree(program)  # type: ignore[no-any-return]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _subtrees(tree: ast.AST) -> Iterator[int]:
    """A hash of the shape of each part of a program that has parts itself, without names and constants."""
    shapes: dict[ast.AST, int] = {}
    for node in reversed(list(ast.walk(tree))):  # children come after their parents
        children = [shapes[child] for child in ast.iter_child_nodes(node)]
        shapes[node] = hash((type(node).__name__, *children))
        if children and not isinstance(node, ast.Name | ast.Constant | ast.arg):
            yield shapes[node]


def _flow(tree: ast.AST) -> set[tuple[int, int]]:
    """Pairs of variables of which the first gets its value from the second, named by their order of appearance."""
    numbers: dict[str, int] = {}
    pairs: set[tuple[int, int]] = set()

    def names(*nodes: ast.AST | None) -> list[int]:
        parts = [part for node in nodes if node is not None for part in ast.walk(node) if isinstance(part, ast.Name)]
        return [numbers.setdefault(part.id, len(numbers)) for part in parts]

    node: Any
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            numbers.setdefault(node.arg, len(numbers))
        elif isinstance(node, ast.Assign) or hasattr(node, "target"):  # of the other assignments and of loops
            targets = names(*node.targets) if isinstance(node, ast.Assign) else names(node.target)
            sources = names(node.iter if hasattr(node, "iter") else node.value)
            sources += targets if isinstance(node, ast.AugAssign) else []
            pairs |= {(target, source) for target in targets for source in sources}
    return pairs
