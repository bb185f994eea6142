"""The training engine of one process: one model on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from verl.batch import Batch
from verl.errors import ConfigError, DataError, TrainingError
from verl.models.packed import PackedModel
from verl.models.segments import pack_rows
from verl.models.shards import load_model_shards, model_shards
from verl.shard import Shard
from verl.training.gradients import Gradients
from verl.training.loss import Loss, LossFn, LossInput, LossNeeds, combine_metrics
from verl.training.micro_batch import split
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig


class SingleEngine:
    """A `TrainEngine` on one device. Dropout is off, in training too.

    Args:
        model: a causal LM, or a value or reward model; its live tensors are trained, none is copied.
        optim: AdamW and its schedule; None: the model is only read (unless `optimizer` is given).
        optimizer: a torch optimizer of the caller's over `model.parameters()`, in the place of AdamW.
        head: what the model predicts.
        max_tokens_per_micro_batch: most flat tokens of one forward; a longer row goes alone.
        micro_batch_size: most rows of one forward.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them. What decides
            on that is then in training mode during an update, so dropout probabilities become zero for good.
        share_prompts: adjacent rows with equal prompts share one forward of it. The numbers stay the same.
        fused_kernels: see `PackedModel`.
        autocast: run matrix products of fp32 weights in bf16; weights in another dtype say it themselves.

    Raises:
        ConfigError: nothing to train, or the model has no gradient checkpointing.
    """

    def __init__(
        self,
        model: Any,
        *,
        optim: OptimConfig | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        head: Literal["lm", "value", "score"] = "lm",
        max_tokens_per_micro_batch: int | None = None,
        micro_batch_size: int | None = None,
        gradient_checkpointing: bool = False,
        share_prompts: bool = True,
        fused_kernels: bool | str = True,
        autocast: bool = False,
    ) -> None:
        self.model = model
        self.head = head
        self.packed = PackedModel(model if head == "lm" else model.backbone, fused_kernels=fused_kernels)
        self.max_tokens = max_tokens_per_micro_batch
        self.max_rows = micro_batch_size
        self.gradient_checkpointing = gradient_checkpointing
        self.share_prompts = share_prompts
        self.autocast = autocast and self.packed.dtype == torch.float32
        self.device = self.packed.device
        #: Of losses and predictions.
        self.exact = torch.float64 if self.packed.dtype == torch.float64 else torch.float32
        self._optimizer: MixedPrecisionOptimizer | None = None
        if optim is not None or optimizer is not None:
            weights = dict(model.named_parameters())
            self._optimizer = MixedPrecisionOptimizer(weights, optim or OptimConfig(max_grad_norm=None), optimizer)
        model.eval()
        if gradient_checkpointing:
            _enable_checkpointing(self.packed.model)

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False) -> dict[str, Tensor]:
        self._must_be("lm")
        return self._predict_all(batch, temperature, entropy)

    def values(self, batch: Batch) -> Tensor:
        self._must_be("value")
        return self._predict_all(batch)["values"]

    def scores(self, batch: Batch) -> Tensor:
        self._must_be("score")
        return self._predict_all(batch)["scores"]

    def update(self, batch: Batch, loss_fn: LossFn, *, weights: Tensor, **needs: Unpack[LossNeeds]) -> dict[str, float]:
        optimizer = self._trained()
        losses: list[Loss] = []
        optimizer.onload()
        try:
            with self._updating(), optimizer.gradients.collecting():
                for loss in self._losses(batch, loss_fn, weights, **needs):
                    if loss.total.requires_grad:
                        # Inside autocast too: the head computes its logits again, in the same precision.
                        with self._precision():
                            (loss.total * optimizer.gradients.loss_scale).backward()
                    losses.append(loss.detached())
            return self._step(optimizer, losses)
        finally:
            optimizer.gradients.clear()

    @torch.no_grad()
    def loss(self, batch: Batch, loss_fn: LossFn, *, weights: Tensor, **needs: Unpack[LossNeeds]) -> dict[str, float]:
        return self._measured([*self._losses(batch, loss_fn, weights, **needs)])

    def shards(self) -> Iterator[Shard]:
        return model_shards(self.model)

    def load_shards(self, shards: Iterable[Shard]) -> None:
        load_model_shards(self.model, shards)
        if self._optimizer is not None:
            self._optimizer.refresh_masters()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._trained().state()

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self._trained().load_state(tensors, meta)

    def offload(self) -> None:
        if self._optimizer is not None:
            self._optimizer.offload()

    def onload(self) -> None:
        if self._optimizer is not None:
            self._optimizer.onload()

    def _losses(
        self,
        batch: Batch,
        loss_fn: LossFn,
        weights: Tensor,
        columns: Sequence[str] = (),
        temperature: float = 1.0,
        entropy: bool = False,
        coupled: bool = False,
    ) -> Iterator[Loss]:
        """The loss of each micro-batch of a mini-batch."""
        if len(batch) == 0:
            raise DataError("the mini-batch has no rows: there is nothing to train on")
        self._must_fit(batch)
        mini = _MiniBatch(batch, weights, columns)
        own, idle = self._micro_batches(batch, coupled)
        for number, rows in enumerate([*own, *idle]):
            part = batch.take(rows)
            with self._precision():
                outputs = self._predict(part, temperature, entropy)
            loss = _checked(loss_fn(mini.loss_input(rows, part, outputs, self.exact)))
            yield loss if number < len(own) else Loss(total=loss.total * 0.0)

    def _micro_batches(self, batch: Batch, coupled: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        """Rows of each micro-batch that this engine computes of a mini-batch, and of those that count for nothing."""
        return self._split(batch, coupled), []

    def _split(self, batch: Batch, coupled: bool = False) -> list[list[int]]:
        return split(batch, self.max_tokens, self.max_rows, coupled, self.share_prompts)

    def _measured(self, losses: list[Loss]) -> dict[str, float]:
        """`loss` and metrics of a mini-batch."""
        return {**combine_metrics([part.metrics for part in losses]), "loss": sum(float(p.total) for p in losses)}

    def _grad_norm(self, gradients: Gradients) -> float:
        """Norm of the gradient of the whole mini-batch, which `gradients` then hold."""
        return gradients.norm()

    def _step(self, optimizer: MixedPrecisionOptimizer, losses: list[Loss]) -> dict[str, float]:
        metrics = self._measured(losses)
        grad_norm, lr, loss = self._grad_norm(optimizer.gradients), optimizer.lr, metrics["loss"]
        if not optimizer.gradients.any():
            raise TrainingError(
                "the loss does not depend on what the model predicts: compute it from log_probs, values or "
                "scores, without detach or no_grad"
            )
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if skipped:
            optimizer.gradients.rejected()
        else:
            optimizer.step(grad_norm)
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "update/skipped": float(skipped)}

    def _predict(self, batch: Batch, temperature: float, entropy: bool) -> dict[str, Tensor]:
        """What the head predicts for one micro-batch, by the names it has in `LossInput`."""
        columns = batch["prompt_tokens"], batch["response_tokens"]
        flat = pack_rows(*columns, self.device, self.share_prompts, keep_last=self.head == "score")
        hidden = self.packed.hidden(flat.tokens, flat.positions, flat.context)
        if self.head == "score":
            return {"scores": self.model.predict(hidden.index_select(0, flat.last))}
        hidden = hidden.index_select(0, flat.predict)
        if self.head == "value":
            return {"values": self.model.predict(hidden)}
        log_probs, entropies = self.packed.log_probs(hidden, flat.targets, temperature=temperature, entropy=entropy)
        return {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}

    @torch.no_grad()
    def _predict_all(self, batch: Batch, temperature: float = 1.0, entropy: bool = False) -> dict[str, Tensor]:
        """Predictions of any number of rows, put back into their order."""
        self._must_fit(batch)
        lengths = [1] * len(batch) if self.head == "score" else batch.lengths("response_tokens")
        names = {"lm": ["log_probs", *["entropy"] * entropy], "value": ["values"], "score": ["scores"]}[self.head]
        pieces: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        with self._precision():
            for rows in self._split(batch):
                for name, flat in self._predict(batch.take(rows), temperature, entropy).items():
                    parts = flat.cpu().split([lengths[row] for row in rows])
                    pieces[name].update(zip(rows, parts, strict=True))
        none = torch.empty(0, dtype=self.exact)
        return {name: torch.cat([none, *(by_row[row] for row in sorted(by_row))]) for name, by_row in pieces.items()}

    @contextmanager
    def _updating(self) -> Iterator[None]:
        self.model.eval()
        # transformers recomputes activations in training mode only; nothing else shall be in it.
        for module in self.model.modules() if self.gradient_checkpointing else ():
            if hasattr(module, "_gradient_checkpointing_func"):
                module.training = True
        try:
            yield
        finally:
            self.model.eval()

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def _must_fit(self, batch: Batch) -> None:
        """Every token has an embedding, and no row is longer than a table of learned positions."""
        model, size = type(self.packed.model).__name__, self.packed.vocab_size
        for name in ("prompt_tokens", "response_tokens"):
            tokens = batch.arrow(name).flatten().to_numpy(zero_copy_only=False)
            if name == "response_tokens" and self.head == "value":  # nothing is asked of the last ones
                ends = np.cumsum([length for length in batch.lengths(name) if length], dtype=np.int64)
                tokens = np.delete(tokens, ends - 1)
            wrong = tokens[(tokens < 0) | (tokens >= size)]
            if len(wrong):
                raise DataError(
                    f"{name} has token {wrong[0]}, {model} embeds {size}: it is of another tokenizer. A critic of "
                    "another vocabulary needs its own (tokenizer=)"
                )
        limit = self.packed.position_table
        lengths = zip(batch.lengths("prompt_tokens"), batch.lengths("response_tokens"), strict=True)
        # What the last token of a response leads to is asked for by a score only.
        fed = [prompt + (response if self.head == "score" else max(0, response - 1)) for prompt, response in lengths]
        if limit is not None and fed and max(fed) > limit:
            row = fed.index(max(fed))
            sample = f" (id {batch['id'][row]})" if "id" in batch else ""
            raise DataError(
                f"row {row}{sample} feeds {fed[row]} tokens to {model}, which has learned {limit} positions: shorten "
                "prompt or response"
            )

    def _must_be(self, head: str) -> None:
        if self.head != head:
            raise TrainingError(f"this engine has a head of kind '{self.head}', not '{head}'")

    def _trained(self) -> MixedPrecisionOptimizer:
        if self._optimizer is None:
            raise TrainingError("this model is only read: make its engine with `optim` to train it")
        return self._optimizer


class _MiniBatch:
    """Cuts the record of a micro-batch out of what is known of the whole mini-batch."""

    def __init__(self, batch: Batch, weights: Tensor, columns: Sequence[str]) -> None:
        lengths = batch.lengths("response_tokens")
        if weights.shape != (sum(lengths),):
            raise DataError(f"{sum(lengths)} response tokens need as many weights, got shape {list(weights.shape)}")
        ends = list(accumulate(lengths))
        self.weights = [weights[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        self.columns = columns
        masked = "response_mask" in batch
        self.totals: dict[str, Any] = {
            "total_sequences": len(batch),
            "total_tokens": int(batch.tensor("response_mask").count_nonzero()) if masked else sum(lengths),
            "total_active": int(weights.count_nonzero()),
            "total_groups": len(batch.group_indices()),
        }

    def loss_input(self, rows: list[int], part: Batch, outputs: dict[str, Any], exact: torch.dtype) -> LossInput:
        device = next(iter(outputs.values())).device
        lengths = part.lengths("response_tokens")
        mask = _aligned(part, "response_mask", lengths) if "response_mask" in part else torch.ones(sum(lengths))
        named = {name: _column(part, name, lengths, exact, device) for name in self.columns if name in part}
        if "old_log_probs" in self.columns and "log_probs" in outputs:
            # One step on the policy's own samples: the policy that wrote them is the one of this very forward.
            named.setdefault("old_log_probs", outputs["log_probs"].detach())
        return LossInput(
            **outputs,
            weights=torch.cat([self.weights[row] for row in rows]).to(device, exact),
            mask=mask.to(device, torch.bool),
            sequence=torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device),
            num_sequences=len(rows),
            columns=named,
            **self.totals,
        )


def _column(batch: Batch, name: str, lengths: list[int], exact: torch.dtype, device: torch.device) -> Tensor:
    """A column as a tensor: `group` as an index, ragged ones flat `[R]`, others `[S]`; floats in `exact`."""
    if name == "group":
        index = torch.empty(len(batch), dtype=torch.int64)
        for number, rows in enumerate(batch.group_indices()):
            index[rows] = number
        return index.to(device)
    is_ragged = hasattr(batch.arrow(name).type, "value_type")
    values = _aligned(batch, name, lengths) if is_ragged else batch.tensor(name)
    return values.to(device, exact if values.is_floating_point() else None)


def _aligned(batch: Batch, name: str, lengths: list[int]) -> Tensor:
    """The flat values of a column that must have one value a response token."""
    found = batch.lengths(name)
    for row, (have, want) in enumerate(zip(found, lengths, strict=True)):
        if have != want:
            sample = f" (id {batch['id'][row]})" if "id" in batch else ""
            raise DataError(f"column '{name}' has {have} values for {want} response tokens in a row{sample}")
    return batch.tensor(name)


def _checked(loss: object) -> Loss:
    if not isinstance(loss, Loss):
        raise TrainingError(f"compute_loss must return a Loss, got {type(loss).__name__}: return Loss(total=...)")
    if loss.total.dim() != 0:
        raise TrainingError(f"Loss.total must be one number, got shape {list(loss.total.shape)}: sum it")
    return loss


def _enable_checkpointing(model: Any) -> None:
    # Older versions of transformers have the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} has no gradient checkpointing: set enable_gradient_checkpointing=false"
        ) from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _Checkpoint(module)


class _Checkpoint:
    """The checkpointing function of a module, inside of which that module too is in evaluation mode: whatever noise
    it would add in training, from its own settings or those of its configuration, is off."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # Nothing is random: there is no generator state to keep for the recomputation.
        return checkpoint(self._evaluated, function, *args, use_reentrant=False, preserve_rng_state=False)

    def _evaluated(self, function: Callable[..., Any], *args: Any) -> Any:
        before, self.module.training = self.module.training, False
        try:
            return function(*args)
        finally:
            self.module.training = before
