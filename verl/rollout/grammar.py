"""Grammars for responses, token by token: a token that violates the grammar is never sampled. Uses xgrammar (extra
`constrained`); vLLM applies grammars itself.

Samples come from the model's distribution, masked and renormalised. As with top-k, their log-probs are of the model
without the mask: the trainer computes the same. The gradient is biased by the probability that the mask
removes, which shrinks as the policy learns the grammar.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from verl._base.extras import load_extra
from verl._host.device import to_device
from verl.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Grammar:
    """A grammar of whole responses: a regular expression, a JSON schema, or an EBNF grammar (GBNF syntax).

    Make one by `regex`, `json_schema` or `ebnf`.

    Raises:
        ConfigError: xgrammar is not installed, or cannot parse it.
    """

    kind: Literal["regex", "json", "grammar"]
    text: str

    def __post_init__(self) -> None:
        grammar = load_extra("xgrammar", "constrained", "a grammar").Grammar
        read = {"regex": grammar.from_regex, "json": grammar.from_json_schema, "grammar": grammar.from_ebnf}
        try:
            read[self.kind](self.text)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"invalid grammar ({self.kind}) {self.text[:80]!r}: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        return cls("json", json.dumps(schema))

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """Its rule `root` is the response."""
        return cls("grammar", rules)

    def mask(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: Iterable[int]) -> GrammarMask:
        """The logits processor of one response, which may end with one of `end_tokens` where the grammar may end.

        Raises:
            RolloutError: there are no such tokens.
        """
        ends = tuple(sorted(end_tokens))
        if not ends:
            raise RolloutError("a response under a grammar must be able to end by a token: leave ignore_eos out")
        xgrammar = load_extra("xgrammar", "constrained", "a grammar")
        compiler = _compiler(tokenizer, vocab_size, ends)
        compile_ = {"regex": "compile_regex", "json": "compile_json_schema", "grammar": "compile_grammar"}[self.kind]
        matcher = xgrammar.GrammarMatcher(getattr(compiler, compile_)(self.text))
        return GrammarMask(matcher, xgrammar.allocate_token_bitmask(1, vocab_size))


@dataclass(eq=False)
class GrammarMask:
    """The tokens that a grammar allows next in one response; a logits processor that excludes all others."""

    _matcher: Any
    _bits: Tensor
    _accepted: int = 0

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        return logits.masked_fill_(to_device(~self.allowed(tokens, len(logits)), logits.device), -torch.inf)

    def allowed(self, tokens: Sequence[int], vocab_size: int) -> Tensor:
        """Which tokens may follow these, which have to grow from call to call; `[V]` bool."""
        for token in tokens[self._accepted :]:
            self._matcher.accept_token(token)
        self._accepted = len(tokens)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits[0].numpy().view(np.uint8), count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))


@functools.lru_cache(maxsize=8)
def _compiler(tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_tokens))
    # Of the compiled grammars of a tokenizer the oldest are dropped.
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 << 20)
