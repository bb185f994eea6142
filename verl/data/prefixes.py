"""A text before each prompt that only the policy reads: rewards read `prompt` and `messages` without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.batch import Batch
from verl.data.chat import ChatTokenizer
from verl.errors import DataError

#: Numbers that models computed for tokens behind the prompt that a sample was drawn with.
_OF_THE_PROMPT = ("rollout_log_probs", "log_probs", "old_log_probs", "ref_log_probs", "values", "cost_values")


def with_prefixes(tokenizer: Any, batch: Batch, prefixes: Sequence[str]) -> Batch:
    """The rows with these texts before their prompts, in the place of those that they have.

    `prompt_tokens` begin with the tokens of the text, behind those with which the tokenizer begins every text (BOS);
    the column `prefix_tokens` says which they are. Numbers of tokens behind another prompt (log-probs, values) are left
    out where a prompt of the batch changes.

    Args:
        batch: with `prompt_tokens`, and `prefix_tokens` if it has been here before.
        prefixes: one for each row.

    Raises:
        DataError: two texts have the same tokens, or a text has none.
    """
    tokens_of = {text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in dict.fromkeys(prefixes)}
    text_of: dict[tuple[int, ...], str] = {}
    for text, tokens in tokens_of.items():
        if not tokens or (other := text_of.setdefault(tuple(tokens), text)) != text:
            what = f"no tokens for the prefix {text!r}" if not tokens else f"the same tokens for {other!r} and {text!r}"
            raise DataError(f"the tokenizer has {what}, so the policy cannot read it: write it with other words")
    begin = ChatTokenizer(tokenizer).around[0]
    former = batch["prefix_tokens"] if "prefix_tokens" in batch else [[]] * len(batch)
    wanted = [tokens_of[text] for text in prefixes]
    if former == wanted:
        return batch
    prompts = []
    for prompt, old, new in zip(batch["prompt_tokens"], former, wanted, strict=True):
        start = len(begin) if prompt[: len(begin)] == begin else 0
        prompts.append([*prompt[:start], *new, *prompt[start + len(old or ()) :]])
    rest = batch.drop(["prompt_tokens", "prefix_tokens", *_OF_THE_PROMPT])
    return rest.add({"prompt_tokens": prompts, "prefix_tokens": wanted})
