"""A reward model: a sequence classifier with one output, under its own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl._base.checked import checked
from verl._base.record import Count
from verl._host.device import put
from verl.data.chat import ChatTokenizer
from verl.data.tokenize import encode_chat, encode_plain, encode_row
from verl.errors import DataError, ModelError
from verl.models.heads import SCORE_AT_EOS, ValueModel
from verl.models.loading import find_tokenizer, load_model, load_tokenizer
from verl.models.packed import evaluating
from verl.models.portable import PortableModel
from verl.rewards.functions import FunctionReward


class RewardModel(FunctionReward):
    """Scores text: prompt and response concatenated, or a chat in the reward model's own template.

    A model that was trained by this package (`score_at_eos` in its `config.json`) gets the tokens that it was trained
    on, which end with the reply's EOS. Others get the whole text, as in their authors' examples.

    Args:
        source: an `AutoModelForSequenceClassification` with one label, a `ValueModel`, or a directory or hub name.
        tokenizer: the reward model's, as an object or a name; found by the model's name if not given.
        batch_size: texts in one forward pass; texts are sorted by length first, to need little padding.
        max_length: tokens of a text, of which the last ones are kept; None: the model's limit.
        dtype: for loading, "auto" or a dtype's name.
        device: where it runs; None: the accelerator where there is one.
        timeout: seconds for all samples of one `score`.
        **options: see `FunctionReward`.

    Raises:
        ModelError: the model has more than one label, no head, or no tokenizer.
    """

    @checked
    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        batch_size: Count = 8,
        max_length: Count | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        **options: Any,
    ) -> None:
        scorer = TextScorer(source, tokenizer, batch_size, max_length, dtype, device)
        if options.get("workers"):
            scorer.source = PortableModel(source) if hasattr(source, "forward") else source
            options["batch_size"] = batch_size
        else:  # a forward takes texts of similar length from all prompts
            options |= {"whole_batch": True, "process": False}
        super().__init__(scorer, **{"name": "reward_model", "timeout": 600.0, **options})


@dataclass(eq=False)
class TextScorer:
    """The reward function of `RewardModel`. Its model is loaded in the process that calls it.

    Attributes:
        score_tokens: token ids of texts -> their scores; where the placement has devices for it, by its workers there.
    """

    source: Any
    tokenizer: Any
    batch_size: int
    max_length: int | None
    dtype: str
    device: str | torch.device | None
    model: Any = field(default=None, init=False)

    def load(self) -> None:
        """Read the files, unless that is done: settings are checked without them."""
        if self.model is not None:
            return
        model = self.source.model if isinstance(self.source, PortableModel) else self.source
        if not hasattr(model, "forward"):
            model = load_model(self.source, dtype=self.dtype, kind="classifier")
        if getattr(model.config, "num_labels", 1) != 1 and not isinstance(model, ValueModel):
            raise ModelError(f"a reward model has one label, this one has {model.config.num_labels}")
        tokenizer = find_tokenizer(model) if self.tokenizer is None else self.tokenizer
        self._chat = ChatTokenizer(load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer)
        self.score_tokens: Callable[..., list[float]] = TokenScorer(model, self.batch_size, self.device)
        self.max_length = self.max_length or getattr(model.config, "max_position_embeddings", None)
        self._at_eos = bool(getattr(model.config, SCORE_AT_EOS, False))
        self.model = model

    def __call__(self, responses: list[str], prompts: list[Any]) -> list[float]:
        """One number for each response to its prompt (a text or a list of messages)."""
        self.load()
        tokens = [self._encode(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return self.score_tokens(tokens)

    def _encode(self, prompt: Any, response: str) -> list[int]:
        is_chat = isinstance(prompt, list)
        if self._at_eos:
            row = {"prompt": prompt or "", "response": response}
            start, reply, _ = encode_chat(self._chat, prompt, [response]) if is_chat else encode_row(self._chat, row)
            tokens = [*start, *reply]
        elif is_chat:
            reply_message = {"role": "assistant", "content": response}
            tokens = self._chat.encode(self._chat.render([*prompt, reply_message], reply=False))
        else:
            tokens = encode_plain(self._chat, (prompt or "") + response, closed=True)
        if not tokens:
            raise DataError("a prompt and a response that are both empty cannot be scored")
        return list(tokens if self.max_length is None else tokens[-self.max_length :])


@dataclass(eq=False)
class TokenScorer:
    """Scores of texts that are token ids, by a sequence classifier of transformers or a `ValueModel`.

    Args:
        batch_size: texts in one forward pass; texts are sorted by length first, to need little padding.
        device: where it runs from the first call on; None: the accelerator where there is one.
    """

    model: Any
    batch_size: int
    device: str | torch.device | None = None

    def __call__(self, tokens: list[list[int]]) -> list[float]:
        put(self.model, None if self.device is None else str(self.device))
        order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
        scores = dict[int, float]()
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            scores |= zip(rows, self._forward([tokens[row] for row in rows]), strict=True)
        return [scores[row] for row in range(len(tokens))]

    def _forward(self, tokens: list[list[int]]) -> list[float]:
        config, parameter = self.model.config, next(self.model.parameters())
        own_pad = config.pad_token_id
        # Transformers scores at the last token that is not padding. A model without a padding token, or one scored at
        # an EOS that may also be its padding, is given an id that ends none of these texts.
        at_eos = bool(getattr(config, SCORE_AT_EOS, False))
        ends, free = {row[-1] for row in tokens}, own_pad is None or own_pad < 0 or at_eos
        pad = next(i for i in range(len(ends) + 1) if i not in ends) if free else own_pad
        ids = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in tokens], batch_first=True)
        try:
            config.pad_token_id = pad
            with evaluating(self.model), torch.inference_mode():
                return self._heads(ids.to(parameter.device), mask.to(parameter.device)).double().tolist()
        finally:
            config.pad_token_id = own_pad

    def _heads(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores `[B]` of right-padded ids `[B, T]`."""
        if not isinstance(self.model, ValueModel):
            return self.model(input_ids=ids, attention_mask=mask).logits[:, 0]  # type: ignore[no-any-return]
        hidden = self.model.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)
        return self.model.score(hidden[rows, mask.sum(-1) - 1])  # type: ignore[no-any-return]
