"""The outputs of a model on a few fixed tokens, to compare it with another."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from verl.models.packed import compute_experts, evaluating

#: Tokens of a row, of two.
LENGTH = 32


@torch.no_grad()
def outputs(model: Any, tokens: Tensor | None = None) -> Tensor:
    """Log-probs `[R, T, V]` of R = 2 rows of T = `LENGTH` tokens over a vocabulary V, or scores `[R]`, or values
    `[R * T]`, in fp32, or fp64 of an fp64 model.

    Args:
        tokens: None: `probe_tokens`.
    """
    ids = (probe_tokens(model) if tokens is None else tokens).to(next(model.parameters()).device)
    compute_experts(getattr(model, "backbone", model))
    with evaluating(model):
        if hasattr(model, "backbone"):
            hidden_RTD = model.backbone(input_ids=ids, use_cache=False)[0]
            result = model.score(hidden_RTD.flatten(0, 1))
        else:
            result = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    result = result if result.dtype == torch.float64 else result.float()
    has_vocabulary = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
    return cast(Tensor, result.log_softmax(-1) if has_vocabulary else result)


def probe_tokens(model: Any) -> Tensor:
    """`[2, LENGTH]`, always the same; those among them that adapters train."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * LENGTH) * 7919 + 13) % vocabulary
    layers = (
        module.token_indices for module in model.modules() if isinstance(getattr(module, "token_indices", None), dict)
    )
    trained = [int(token) for indices in layers for of_adapter in indices.values() for token in of_adapter]
    ids[1 : 1 + len(trained)] = torch.tensor(trained[: 2 * LENGTH - 1], dtype=ids.dtype)
    return cast(Tensor, ids.view(2, LENGTH))
