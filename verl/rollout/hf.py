"""The reference engine: transformers' own forward and cache over a left-padded batch. Slow and simple.

A batch runs until its last response is finished; then the next one begins. It samples as the embedded engine, with the
same random numbers, so both give the same tokens up to rounding.

Some models do not keep their state in such a cache (state-space models), or count positions through padding. So a few
tokens are first compared with a plain forward; if they differ, each step recomputes whole rows, padded on the right,
where causality hides the padding. With rotary embeddings that depend on the row's length (longrope), a row that becomes
long is recomputed, and short and long rows are never computed together.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from verl.errors import ConfigError, ModelError
from verl.kernels.compiled import kernels
from verl.models.lora import adapters_off
from verl.models.packed import evaluating
from verl.models.rope import original_length
from verl.rollout.base import Request, Sample, SamplingParams, check_new
from verl.rollout.embedded.response import Response, ResponseOptions, sample_next
from verl.weights.shard import Shard
from verl.weights.shards import take_model_shards

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_UNLIMITED = 1 << 30
# A row that is padded, one that is dropped before the second step, and the longest.
_PROBE = ([7, 19, 5], [11, 3], [23, 2, 13, 17, 3, 29, 11, 5, 31])
_NEXT = [5, 31]  # after each of them
# Of logits around their mean, by the model's dtype; parts of an fp64 model may compute in fp32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Logits that a forward of whole rows makes at a time.
_LOGITS = 1 << 27


class HFEngine:
    """Batches of at most `max_batch` responses through `model`'s forward. See `RolloutEngine` for the methods.

    Args:
        model: any causal LM of transformers; its weights are read where they are.
        tokenizer: for stop strings, guards and grammars.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        max_batch: responses that run at a time.
        max_length: prompt and response together; None: what the model allows.

    Raises:
        ConfigError: `max_batch` is not positive.
        ModelError: a row of the model's logits depends on other rows of the batch or on tokens after it.
    """

    is_live = tells_top = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        max_batch: int = 64,
        max_length: int | None = None,
    ) -> None:
        if max_batch < 1:
            raise ConfigError(f"rollout: max_batch must be positive, got {max_batch}")
        config = model.config.get_text_config()
        limits = (max_length, getattr(config, "max_position_embeddings", None))
        self.model, self.max_batch = model, max_batch
        self.max_length = min((int(limit) for limit in limits if limit), default=_UNLIMITED)
        self.policy_version = 0
        self._original_length = original_length(config) or _UNLIMITED
        self._vocab_size = int(config.vocab_size)
        self._responses = ResponseOptions(seed, self._vocab_size, self.max_length, tuple(eos_token_ids), tokenizer)
        self._accepted = inspect.signature(model.forward).parameters
        #: In the order of arrival.
        self._by_id: dict[str, Response] = {}
        self._batch: list[Response] = []
        #: Whether a cache and padding on the left give what a plain forward does.
        self.cached = True
        self.sleep()
        self._choose_forward()

    @property
    def unfinished(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RolloutError: it is invalid, or its id is in use.
        """
        check_new(request, self._by_id)
        self._by_id[request.id] = Response(request, self._responses)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """Sample one token for every response of the batch; return the finished ones.

        Raises:
            RolloutError: the logits are not finite.
        """
        self._keep([row for row, response in enumerate(self._batch) if response.finish is None])
        if not self._batch:
            self.sleep()
            self._batch = [r for r in self._by_id.values() if r.finish is None][: self.max_batch]
        if self._batch:
            try:
                logits = self._forward()
                sample_next(self._batch, logits, self.policy_version, kernels(logits.dtype, logits.device)).take()
            except BaseException:
                self.sleep()  # the cache is ahead of the responses
                raise
        done = [response for response in self._by_id.values() if response.finish is not None]
        for response in done:
            del self._by_id[response.id]
        return [response.sample(self.policy_version) for response in done]

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them. Ids of no request are ignored."""
        for name in ids:
            response = self._by_id.get(name)
            if response is not None and response.finish is None:
                response.finish = "abort"

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights in place; nothing is copied for tensors that are the model's own.

        Raises:
            CheckpointError: a shard does not fit the model.
        """
        take_model_shards(self.model, shards)
        self.sleep()
        self.policy_version = version

    def sleep(self) -> None:
        """Free the memory of the cache. Unfinished requests are kept: the running ones continue after their rows are
        recomputed."""
        self._batch = []
        self._cache: Any = None
        self._cache_is_long = False
        self._mask = torch.empty(0, 0, dtype=torch.int64)

    def wake(self) -> None:
        """Nothing to do: each batch makes its own cache."""

    def _keep(self, rows: list[int]) -> None:
        """Drop all other rows of the batch."""
        if len(rows) == len(self._batch):
            return
        self._batch = [self._batch[row] for row in rows]
        if self._cache is not None and not all(hasattr(x, "batch_select_indices") for x in self._cache.layers):
            self._cache = None  # some layers' states cannot be split: recompute the rows
        elif self._cache is not None and rows:
            index = torch.tensor(rows, device=self._mask.device)
            self._cache.batch_select_indices(index)
            self._mask = self._mask[index]

    def _forward(self) -> Tensor:
        """Logits `[B, V]` of each response's next token, in fp32 (fp64 for an fp64 model)."""
        rows = [[*r.prompt, *r.tokens] for r in self._batch]
        kinds = {len(row) > self._original_length for row in rows}
        cached = self.cached and len(kinds) == 1
        if not cached or self._cache_is_long not in kinds:
            self._cache = None
        with evaluating(self.model):
            logits = self._logits_by_cache(rows) if cached else self._logits_of_whole_rows(rows)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _logits_by_cache(self, rows: list[list[int]]) -> Tensor:
        device = self.model.device
        if self._cache is None:
            longest = max(map(len, rows))
            padding = [longest - len(row) for row in rows]
            tokens = torch.tensor([[0] * n + row for n, row in zip(padding, rows, strict=True)], device=device)
            mask = [[0] * n + [1] * len(row) for n, row in zip(padding, rows, strict=True)]
            self._cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            self._mask = torch.tensor(mask, device=device)
            self._cache_is_long = longest > self._original_length
        else:
            tokens = torch.tensor([row[-1:] for row in rows], device=device)
            self._mask = torch.cat([self._mask, torch.ones_like(tokens)], 1)
        options: dict[str, Any] = {}
        if "position_ids" in self._accepted:
            options["position_ids"] = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if "logits_to_keep" in self._accepted:
            options["logits_to_keep"] = 1
        output = self.model(
            input_ids=tokens, attention_mask=self._mask, past_key_values=self._cache, use_cache=True, **options
        )
        return cast(Tensor, output.logits[:, -1])

    def _logits_of_whole_rows(self, rows: list[list[int]]) -> Tensor:
        size = max(1, _LOGITS // (max(map(len, rows)) * self._vocab_size))
        by_row: dict[int, Tensor] = {}
        for is_long in (False, True):
            alike = [i for i, row in enumerate(rows) if (len(row) > self._original_length) == is_long]
            for some in (alike[start : start + size] for start in range(0, len(alike), size)):
                longest = max(len(rows[i]) for i in some)
                padded = [rows[i] + rows[i][:1] * (longest - len(rows[i])) for i in some]
                tokens = torch.tensor(padded, device=self.model.device)
                output = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
                by_row |= {i: logits[len(rows[i]) - 1] for i, logits in zip(some, output.logits, strict=True)}
        return torch.stack([by_row[i] for i in range(len(rows))])

    @torch.no_grad()
    def _choose_forward(self) -> None:
        """Use the cache if it gives the logits of a plain forward, else whole rows if those do.

        Raises:
            ModelError: neither does.
        """
        name = type(self.model).__name__
        tolerance = _TOLERANCE.get(self.model.dtype, 0.05)
        more = [token % self._vocab_size for token in _NEXT]
        rows = [[token % self._vocab_size for token in row][: self.max_length - len(more)] for row in _PROBE]
        # Three steps; the first row ends before the last one.
        steps = [rows, [row + more[:1] for row in rows], [row + more for row in rows[1:]]]
        ids = (torch.tensor([row], device=self.model.device) for rows in steps for row in rows)
        with evaluating(self.model):
            plain = torch.stack([self.model(input_ids=row, use_cache=False).logits[0, -1] for row in ids])
        plain = plain.to(torch.promote_types(plain.dtype, torch.float32))
        if not plain.isfinite().all():
            return  # sampling raises an error for broken weights
        try:
            if (difference := self._difference(steps, plain)) <= tolerance:
                return
            reason = f"logits differ by {difference:.1%}"
        except Exception as error:  # a model's code may fail in any way on this cache
            reason = f"{type(error).__name__}: {error}"
        self.cached = False
        if not (difference := self._difference(steps, plain)) <= tolerance:
            raise ModelError(
                f"the logits of {name} depend on tokens to come or on other rows (they differ by {difference:.1%}): "
                "it cannot be sampled from"
            )
        text = "%s cannot use a cache over padded rows (%s): every step computes whole rows, and the time grows"
        logger.warning(text + " with the square of their length", name, reason)

    def _difference(self, steps: list[list[list[int]]], plain: Tensor) -> float:
        """The largest relative difference between `plain` and our logits of these steps' rows."""
        requests = [Request(str(i), row, SamplingParams(max_new_tokens=1)) for i, row in enumerate(steps[0])]
        self._batch = [Response(request, self._responses) for request in requests]
        try:
            logits = [self._forward()]
            for rows in steps[1:]:
                self._keep([*range(len(self._batch) - len(rows), len(self._batch))])
                for response, row in zip(self._batch, rows, strict=True):
                    response.tokens.append(row[-1])
                logits.append(self._forward())
        finally:
            self.sleep()
        got, want = (each - each.mean(-1, keepdim=True) for each in (torch.cat(logits), plain))
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)).nan_to_num(torch.inf).max())


class StartingEngine(HFEngine):
    """The weights that training began with; stepped in the thread of the policy's engine.

    Args:
        model: a copy of these weights; or the model that is trained, if only adapters of it are.
        first: what else of it is trained, as it was, see `verl.models.lora.reference_weights`.
        **options: of `HFEngine`.
    """

    def __init__(self, model: PreTrainedModel, first: Mapping[str, Tensor], **options: Any) -> None:
        self._first = first
        super().__init__(model, **options)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        with adapters_off(self.model, self._first):
            return super().step()
