"""Replies that must be a call of a tool, or match a schema: held by grammar, as `verl.rollout.grammar` holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.extras import load_extra
from verl.rollout.gateway.dialects.form import ChatRequest, RequestError
from verl.rollout.gateway.replies import Family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.grammar import Grammar

#: Family -> what stands before a call, the name of its arguments, and what stands behind.
_CALLS = {
    "hermes": ("<tool_call>\n", "arguments", "\n</tool_call>"),
    "llama 3": ("", "parameters", ""),
    "mistral": ("[TOOL_CALLS][", "arguments", "]"),
}


def grammar_of(request: ChatRequest, family: Family | None, prompt: str) -> Grammar | None:
    """What a request says of the form of its reply.

    Args:
        prompt: as the template writes it.

    Raises:
        RequestError: no grammar can hold that.
    """
    forced = request.choice not in ("auto", "none")
    if not forced and request.schema is None:
        return None
    if prompt.rstrip().endswith("<think>"):
        raise _not_held("a reply that begins with a thought")
    from verl.rollout.grammar import Grammar

    library = load_extra("xgrammar", "constrained", "a request that forces its reply").Grammar
    parts = []
    try:
        if forced or (request.tools and request.choice == "auto"):
            parts.append(_call_grammar(library, request, family))
        if request.schema is not None and not forced:
            parts.append(library.from_json_schema(json.dumps(request.schema)))
        return Grammar.ebnf(str(parts[0] if len(parts) == 1 else library.union(*parts)))
    except (RuntimeError, ValueError) as error:  # xgrammar's, of a schema
        raise _not_held(f"this schema ({str(error)[:200]})") from error


def _call_grammar(library: Any, request: ChatRequest, family: Family | None) -> Any:
    """One call, of the tool that was named or of any."""
    if family is None or family.name not in _CALLS:
        raise _not_held(f"a call in the syntax of {family.name if family else 'this template'}")
    before, key, after = _CALLS[family.name]
    functions = [tool["function"] for tool in request.tools]
    if request.choice not in ("required", "auto"):
        functions = [function for function in functions if function["name"] == request.choice]
    calls = [_object({"name": {"const": each["name"]}, key: each["parameters"]}) for each in functions]
    call = library.from_json_schema(json.dumps({"anyOf": calls}), any_whitespace=False)
    around = [library.from_ebnf(f"root ::= {json.dumps(text)}") if text else None for text in (before, after)]
    return library.concat(*filter(None, (around[0], call, around[1])))


def _object(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _not_held(what: str) -> RequestError:
    return RequestError(400, f"{what} cannot be held by a grammar: ask with tool_choice 'auto'", "tool_choice")


def only_choices(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], tokens: Sequence[int]
) -> list[bool]:
    """Of each token of a reply, whether the grammar left no other one."""
    size = max(len(tokenizer), *tokens, 0) + 1
    mask = grammar.mask(tokenizer, size, ends)
    return [mask.count_allowed(tokens[:index], size) == 1 for index in range(len(tokens))]
