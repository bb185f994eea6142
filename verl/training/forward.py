"""A model as a function of a micro-batch: flat tokens in, what its head predicts out; and gradient checkpointing:
activations are computed again in the backward pass instead of being kept.

Shapes: R response tokens of all rows, row after row; S rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl._base.autograd import take_rows
from verl.algorithms.loss_terms import LossNeeds
from verl.attention.prefix_tree import PrefixTree
from verl.attention.segments import Packed, pack_rows
from verl.batch import Batch
from verl.errors import DataError
from verl.models.packed import PackedModel, evaluating
from verl.training.options import EngineOptions, Head

if TYPE_CHECKING:
    from verl.training.parallel.pipeline import Stage

_PREDICTS = {"lm": ("log_probs", "entropy"), "value": ("values",), "score": ("scores",)}
#: What `LossInput` calls the statistics of `token_log_probs`.
_STATISTICS = ("entropy", "mean_logits", "is_top")


class Forward(nn.Module):
    """The whole computation of a micro-batch as one module, so that what wraps modules (FSDP) sees all of it.

    Args:
        model: a causal LM for the head "lm", a `ValueModel` for the others.
        packed: `model` (or its backbone) as a `PackedModel`, if there is one already.
        options: with `share_prompts`, adjacent rows share one forward of their common prefix; with `use_amp`, matrix
            products of fp32 weights run in bf16 (weights in another dtype are not touched); without `remove_padding`,
            or if the model has no packed forward, rows are padded to one length and go through transformers' own
            forward. Only `use_amp` changes the numbers.
        device: as of `PackedModel`.
    """

    def __init__(
        self, model: Any, head: Head, packed: PackedModel | None, options: EngineOptions, device: Any = None
    ) -> None:
        super().__init__()
        self.model, self.head, self.predicts = model, head, _PREDICTS[head]
        self.share_prompts = options.share_prompts
        backbone = model if head == "lm" else model.backbone
        self.packed = packed or PackedModel(backbone, fused_kernels=options.fused_kernels, device=device)
        #: Whether micro-batches are computed as padded rows.
        self.is_padded = not (options.remove_padding and self.packed.supports_packed)
        #: Cuts the tokens over ranks that share rows.
        self.slicing: Callable[[Packed], Packed] | None = None
        self.autocast = options.use_amp and self.packed.dtype == torch.float32
        #: The part of the model that is here, where a pipeline cuts it.
        self.stage: Stage | None = None

    def asked(self) -> dict[str, str]:
        """The model's properties that rule out some settings, by their names in `verl._base.combinations`."""
        if not self.is_padded:
            return {}
        kind = f"{type(self.packed.model).__name__} cannot be called so"
        return {"padded rows": "use_remove_padding is false" if self.packed.supports_packed else kind}

    def wanted(self, needs: LossNeeds) -> tuple[str, ...]:
        """The predictions that a loss reads, and "statistics" if they are asked for."""
        more = ("statistics",) * (needs.statistics and self.head == "lm")
        return (*self.predicts[: 1 + needs.entropy], *more)

    def precision(self) -> Any:
        """The context of forward and backward: the head computes its logits again in the backward pass."""
        return torch.autocast(self.packed.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def pack(self, batch: Batch, tree: PrefixTree | None = None) -> Packed:
        """The rows of a micro-batch as flat tokens, or this rank's slice of these; `tree` as of `pack_rows`. The head
        of a language model skips what the policy did not write, if there is a `response_mask`."""
        columns = batch["prompt_tokens"], batch["response_tokens"]
        flat = pack_rows(*columns, self.packed.device, self.share_prompts, self.head == "score", tree)
        if self.head == "lm" and "response_mask" in batch:
            flat = flat.predicting(batch.tensor("response_mask"))
        return flat if self.slicing is None else self.slicing(flat)

    def forward(self, flat: Packed, want: tuple[str, ...], temperature: float = 1.0) -> dict[str, Tensor]:
        """Predictions by their names in `LossInput`: `[R]`, or `[S]` for scores. A pipeline stage without the head
        returns "hidden", the input of the next stage."""
        if self.is_padded:
            hidden = self.packed.padded_hidden(flat.tokens, flat.context)
        else:
            hidden = self.packed.hidden(flat.tokens, flat.positions, flat.context)
        if self.stage is not None and self.stage.outgoing is not None:
            return {"hidden": self.stage.outgoing}
        if self.head == "score":
            return {"scores": flat.gather(self.model.score(take_rows(hidden, flat.last)))}
        hidden = take_rows(hidden, flat.predict)
        if self.head == "value":
            return {"values": flat.gather(self.model.score(hidden))}
        seen = None
        if "statistics" in want:
            seen = hidden.new_zeros((3, len(hidden)), dtype=torch.promote_types(hidden.dtype, torch.float32))
        log_probs, entropies = self.packed.log_probs(
            hidden, flat.targets, temperature=temperature, entropy="entropy" in want, statistics=seen
        )
        outputs: dict[str, Tensor] = {} if seen is None else dict(zip(_STATISTICS, seen, strict=True))
        outputs |= {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})
        return {name: flat.gather(value).clone() for name, value in outputs.items()}  # FSDP's hooks take no views

    def check_batch(self, batch: Batch) -> None:
        """Raises DataError: a token has no embedding, or a row is longer than a table of learned positions."""
        model, size = type(self.packed.model).__name__, self.packed.vocab_size
        for name in ("prompt_tokens", "response_tokens"):
            tokens = batch.arrow(name).flatten().to_numpy(zero_copy_only=False)
            if name == "response_tokens" and self.head == "value":  # the last token of a response is not fed
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
        fed = [prompt + (response if self.head == "score" else max(0, response - 1)) for prompt, response in lengths]
        if limit is not None and fed and max(fed) > limit:
            row = fed.index(max(fed))
            sample = f" (id {batch['id'][row]})" if "id" in batch else ""
            raise DataError(
                f"row {row}{sample} feeds {fed[row]} tokens to {model}, which has learned {limit} positions: shorten "
                "prompt or response"
            )


def enable_checkpointing(model: Any) -> None:
    """Switch it on for a transformers model that has it; its dropout probabilities become zero for good."""
    # Older versions of transformers have the second name only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
        if hasattr(module, "_gradient_checkpointing_func"):
            # Nothing is random: there is no generator state to keep for the recomputation.
            module._gradient_checkpointing_func = partial(
                checkpoint, partial(_evaluated, module), use_reentrant=False, preserve_rng_state=False
            )


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Inside, forwards keep no activations of layers: transformers recomputes in training mode only."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module.training = True
    try:
        yield
    finally:
        model.eval()


def _evaluated(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """A function of a module, which is in evaluation mode meanwhile: whatever noise it would add in training stays
    off."""
    with evaluating(module):
        return function(*args)
