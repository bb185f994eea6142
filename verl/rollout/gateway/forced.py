"""Replies that must be a call of a tool, or match a schema: held by grammar, as `verl.rollout.grammar` holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl._base.extras import load_extra
from verl.rollout.gateway.dialects.base import ChatRequest, RequestError
from verl.rollout.gateway.messages import Family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.rollout.grammar import Grammar

#: Family -> what begins a call, what follows before its JSON, the name of its arguments, and what ends it.
_CALLS = {
    "hermes": ("<tool_call>", "\n", "arguments", "\n</tool_call>"),
    "llama 3": ("", "", "parameters", ""),
    "mistral": ("[TOOL_CALLS]", "[", "arguments", "]"),
}
#: A reply of Llama 3 that is no call.
_NO_CALL = r"[^{\s<][\s\S]*"


def constrains_reply(request: ChatRequest) -> bool:
    """Whether a request constrains its reply."""
    is_held = request.choice not in ("auto", "none") or (request.choice == "auto" and bool(request.strict))
    return is_held or request.schema is not None


def grammar_of(request: ChatRequest, family: Family | None, prompt: str) -> Grammar:
    """The grammar that a request demands of its reply, see `constrains_reply`.

    Args:
        prompt: as the template writes it.

    Raises:
        RequestError: no grammar can hold that.
    """
    is_forced = request.choice not in ("auto", "none")
    is_strict = request.choice == "auto" and bool(request.strict)
    if prompt.rstrip().endswith("<think>") and not (is_strict and request.schema is None):
        raise _not_held("a reply that begins with a thought")
    from verl.rollout.grammar import Grammar

    parts = []
    try:
        library = load_extra("xgrammar", "constrained", "a request that forces its reply").Grammar
        if is_forced or (request.schema is not None and request.tools and request.choice == "auto"):
            parts.append(_call_grammar(library, request, family, is_free=False))
        elif is_strict:
            parts.append(_call_grammar(library, request, family, is_free=True))
        if request.schema is not None and not is_forced:
            parts.append(library.from_json_schema(json.dumps(request.schema)))
        return Grammar.ebnf(str(parts[0] if len(parts) == 1 else library.union(*parts)))
    except (RuntimeError, ValueError) as error:  # xgrammar's, of a schema; or it is not installed
        raise _not_held(f"this schema ({' '.join(str(error).split())[:200]})") from error


def _call_grammar(library: Any, request: ChatRequest, family: Family | None, is_free: bool) -> Any:
    """One call, of the tool that was named or of any; `is_free`: any text, in which each call matches its schema."""
    if family is None or family.name not in _CALLS:
        raise _not_held(f"a call in the syntax of {family.name if family else 'this template'}")
    begin, before, key, after = _CALLS[family.name]
    calls = []
    for function in (tool["function"] for tool in request.tools):
        is_lax = request.choice == "auto" and request.schema is None and function["name"] not in request.strict
        arguments = {"type": "object"} if is_lax else function["parameters"]
        if request.choice in ("auto", "required", function["name"]):
            properties = {"name": {"const": function["name"]}, key: arguments}
            fields = {"type": "object", "required": ["name", key], "additionalProperties": False}
            calls.append({**fields, "properties": properties})
    if is_free and begin:
        tags = [
            {"begin": begin + before, "content": {"type": "json_schema", "json_schema": call}, "end": after}
            for call in calls
        ]
        text = {"type": "triggered_tags", "triggers": [begin], "tags": tags}
        return library.from_structural_tag({"type": "structural_tag", "format": text})
    call = library.from_json_schema(json.dumps({"anyOf": calls}), any_whitespace=False)
    around = [library.from_ebnf(f"root ::= {json.dumps(text)}") if text else None for text in (begin + before, after)]
    whole = library.concat(*filter(None, (around[0], call, around[1])))
    return library.union(whole, library.from_regex(_NO_CALL)) if is_free else whole


def _not_held(what: str) -> RequestError:
    return RequestError(400, f"{what} cannot be held by a grammar: ask with tool_choice 'auto'", "tool_choice")


def only_choices(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], tokens: Sequence[int]
) -> list[bool]:
    """For each token of a reply, whether the grammar allowed no other."""
    size = max(len(tokenizer), *tokens, 0) + 1
    mask = grammar.mask(tokenizer, size, ends)
    return [int(mask.allowed(tokens[:index], size).sum()) == 1 for index in range(len(tokens))]
