"""The plain engine: transformers' own forward and cache over a left-padded batch. Slow, simple, the reference.

A batch runs until its last response is finished; then the next one begins. Sampling and randomness are those
of the embedded engine, so both give the same tokens up to rounding.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from verl.errors import ConfigError, RolloutError
from verl.models.shards import load_model_shards
from verl.rollout.base import Request, Sample
from verl.rollout.response import Response, draw
from verl.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_UNLIMITED = 1 << 30


class HFEngine:
    """Batches of at most `max_batch` responses through `model`'s forward. See `RolloutEngine` for the verbs.

    Args:
        model: any causal LM of transformers; its weights are read where they are.
        tokenizer: needed for stop strings alone.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        max_batch: responses that run at a time.
        max_length: prompt and response together; None: what the model allows.

    Raises:
        ConfigError: `max_batch` is not positive.
    """

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
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        self.max_batch = max_batch
        self.max_length = min((int(limit) for limit in limits if limit), default=_UNLIMITED)
        self.policy_version = 0
        self._vocab_size = int(config.vocab_size)
        self._accepted = inspect.signature(model.forward).parameters
        self._waiting: deque[Response] = deque()
        self._by_id: dict[str, Response] = {}
        self._forget_batch()

    @property
    def unfinished(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RolloutError: it can never be answered, or its id is in use.
        """
        if request.id in self._by_id:
            raise RolloutError(f"request '{request.id}' is already being answered: ids must differ")
        response = Response(
            request,
            seed=self.seed,
            vocab_size=self._vocab_size,
            max_length=self.max_length,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
        )
        self._by_id[request.id] = response
        self._waiting.append(response)

    @torch.no_grad()
    def step(self) -> list[Sample]:
        """One token for every response of the batch; those that finished.

        Raises:
            RolloutError: the logits are not finite.
        """
        self._keep([r.finish is None for r in self._batch])
        if not self._batch:
            self._next_batch()
        if self._batch:
            try:
                draw(self._batch, self._forward(), self.policy_version)
            except BaseException:
                self._restart_batch()  # what the cache has read is not what the responses are
                raise
        done = [response for response in self._by_id.values() if response.finish is not None]
        for response in done:
            del self._by_id[response.id]
        return [response.sample(self.policy_version) for response in done]

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them. Ids that are not in work are passed over."""
        for name in ids:
            response = self._by_id.get(name)
            if response is not None and response.finish is None:
                response.finish = "abort"

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights in place; tensors that are the model's own are only noted.

        Raises:
            CheckpointError: a shard does not fit the model.
        """
        own = {tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        shards = list(shards)
        if not all(shard.tensor.data_ptr() in own for shard in shards):
            load_model_shards(self.model, shards)
        self._restart_batch()
        self.policy_version = version

    def sleep(self) -> None:
        """Give back the memory of the cache; unfinished requests are kept."""
        self._restart_batch()

    def wake(self) -> None:
        """Nothing to do: a batch makes its own cache."""

    def _forget_batch(self) -> None:
        self._batch: list[Response] = []
        self._cache: Any = None
        self._mask = torch.empty(0, 0, dtype=torch.int64)

    def _restart_batch(self) -> None:
        """Put the running responses back: they go on from what they have, read anew."""
        self._waiting.extendleft(reversed(self._batch))
        self._forget_batch()

    def _next_batch(self) -> None:
        self._forget_batch()
        while self._waiting and len(self._batch) < self.max_batch:
            response = self._waiting.popleft()
            if response.finish is None:
                self._batch.append(response)

    def _keep(self, keep: list[bool]) -> None:
        """Drop the rows of finished responses."""
        if all(keep):
            return
        rows = [row for row, kept in enumerate(keep) if kept]
        self._batch = [self._batch[row] for row in rows]
        if self._cache is not None and rows:
            index = torch.tensor(rows, device=self._mask.device)
            self._cache.batch_select_indices(index)
            self._mask = self._mask[index]

    def _forward(self) -> Tensor:
        """Logits `[B, V]` that follow each response so far, in fp32 (fp64 for an fp64 model)."""
        device = self.model.device
        if self._cache is None:
            rows = [[*r.prompt, *r.tokens] for r in self._batch]
            longest = max(map(len, rows))
            padding = [longest - len(row) for row in rows]
            tokens = torch.tensor([[0] * n + row for n, row in zip(padding, rows, strict=True)], device=device)
            mask = [[0] * n + [1] * len(row) for n, row in zip(padding, rows, strict=True)]
            self._cache = DynamicCache()
            self._mask = torch.tensor(mask, device=device)
        else:
            tokens = torch.tensor([[r.tokens[-1]] for r in self._batch], device=device)
            self._mask = torch.cat([self._mask, torch.ones_like(tokens)], 1)
        options: dict[str, Any] = {}
        if "position_ids" in self._accepted:
            options["position_ids"] = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if "logits_to_keep" in self._accepted:
            options["logits_to_keep"] = 1
        training = self.model.training
        self.model.eval()
        try:
            output = self.model(
                input_ids=tokens,
                attention_mask=self._mask,
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )
        finally:
            self.model.train(training)
        logits: Tensor = output.logits[:, -1]
        return logits if logits.dtype == torch.float64 else logits.float()
