"""KTO: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306), equation 7.

The reference point, KL of policy and reference, is estimated as in the paper from mismatched pairs: the prompt of
each row with the response of a row before it that has another prompt (round the end of the batch), one estimate for
the whole batch, clamped at 0. These rows are added by `extend`, read by both models like any others, and gone after
`prepare`. TRL estimates it for each micro-batch of a rank, as `kl_rows` does; and data may bring the other response of
each row themselves, in a column `kl_response_tokens`.

With `loss_type="apo_zero_unpaired"` there is no reference point, and no mismatched rows: APO (arXiv:2408.06266,
equation 7) of single responses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from verl._base.record import Count, NotNegative, Positive
from verl.algorithms.base import NOT_BY_TOKEN, BaseAlgorithm, Loss, LossInput, present
from verl.algorithms.episodes import one_trajectory
from verl.algorithms.pairs import sequence_log_probs
from verl.algorithms.registry import register_algorithm
from verl.algorithms.responses import Responses
from verl.batch import Batch
from verl.errors import DataError

_OF_THE_RESPONSE = ("response_tokens", "response_mask")


@register_algorithm("kto")
class KTO(BaseAlgorithm):
    """Rows with label 1 (desirable) or 0 (undesirable); no pairs are needed.

    Options:
        beta: scale of the implicit reward. desirable_weight, undesirable_weight: of the two kinds of rows.
        loss_type: see the module.
        kl_rows: rows of an estimate of the reference point, one after another; None: all of the batch.
    """

    roles = frozenset({"actor", "reference"})
    loss_columns = ("label", "ref_log_probs", "kto_kl")
    unread = NOT_BY_TOKEN
    read_with: ClassVar = {"kl_rows": ("loss_type", "kto")}
    online = False
    needs_log_probs = True
    samples_per_prompt = 4

    beta: Positive = 0.1
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    kl_rows: Count | None = None

    def extend(self, batch: Batch) -> Batch:
        """With labels (samples with rewards get them, see `labels_by_reward`) and mismatched rows."""
        if "mismatched" in batch:
            return batch
        batch = one_trajectory(batch, self.name)
        if "label" not in batch and "reward" in batch:
            batch = batch.add({"label": labels_by_reward(batch)})
        if self.loss_type != "kto":
            return batch.add({"mismatched": [False] * len(batch)})
        if len(batch) < 2 and "kl_response_tokens" not in batch:
            raise DataError("kto needs at least two rows a batch: its KL is of prompts with other rows' responses")
        names = [name for name in ("id", "group", "prompt_tokens", *_OF_THE_RESPONSE) if name in batch]
        if "kl_response_tokens" in batch:
            tokens = batch["kl_response_tokens"]
            others = Batch.from_columns(
                {"response_tokens": tokens, "response_mask": [[1] * len(ids) for ids in tokens]}
            )
            batch = batch.drop(["kl_response_tokens"])
        else:
            others = batch.take(_of_another_prompt(batch["prompt_tokens"])).select(_OF_THE_RESPONSE)
        mismatched = batch.select(names).drop(_OF_THE_RESPONSE).add(others)
        if "id" in batch:
            mismatched = mismatched.drop(["id"]).add({"id": [f"{id_}/mismatched" for id_ in batch["id"]]})
        rows = len(batch)
        return Batch.concat([batch.add({"mismatched": [False] * rows}), mismatched.add({"mismatched": [True] * rows})])

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The rows with a label, and column `kto_kl`.

        Raises:
            DataError: there are no mismatched rows, or no labelled ones.
        """
        if "mismatched" not in batch:
            raise DataError("kto needs mismatched rows for its KL: pass the batch through `extend` before the models")
        mismatched = batch.tensor("mismatched") != 0
        responses = Responses(batch)
        difference = responses.tokens("log_probs") - responses.tokens("ref_log_probs")
        ratios = responses.sum(torch.where(responses.written, difference, 0.0))
        others = ratios[mismatched]
        estimates = [part.mean().clamp(min=0.0).expand(len(part)) for part in others.split(self.kl_rows or len(others))]
        kl = torch.cat(estimates) if self.loss_type == "kto" else torch.zeros_like(others)
        labels = batch.tensor("label", torch.float64)
        train = ~mismatched & labels.isfinite()
        dropped = int((~mismatched & ~labels.isfinite()).sum())
        if not train.any():
            raise DataError("kto found no row with a label (column 'label': 1 desirable, 0 undesirable)")
        of_row = torch.zeros(len(batch), dtype=torch.float64)
        of_row[~mismatched] = kl if len(kl) else 0.0
        prepared = batch.add({"kto_kl": of_row}).filter(train.tolist())
        return prepared, {"kl": float(kl.mean()) if len(kl) else 0.0, "kto/unlabelled": float(dropped)}

    def compute_loss(self, x: LossInput) -> Loss:
        ratio = sequence_log_probs(x, self.needed_log_probs(x) - x.columns["ref_log_probs"])
        good = x.columns["label"] > 0.5
        sign = torch.where(good, 1.0, -1.0).to(ratio.dtype)
        desirable, undesirable = map(ratio.new_tensor, (self.desirable_weight, self.undesirable_weight))
        weight = torch.where(good, desirable, undesirable)
        losses = weight * (1 - torch.sigmoid(self.beta * sign * (ratio - x.columns["kto_kl"])))
        rows = max(x.total_sequences, 1)
        margin = self.beta * (sign * ratio).detach().sum() / rows
        return Loss(total=losses.sum() / rows, metrics={"kto/margin": margin})


def labels_by_reward(batch: Batch) -> list[float]:
    """1 where a sample's reward is above the mean of its prompt's samples, 0 where it is below, NaN (no label) at it.
    Where no prompt has two samples, it is compared with the mean of the batch."""
    rewards, scored = batch.tensor("reward", torch.float64), present(batch)
    groups = batch.group_indices()
    if all(len(group) == 1 for group in groups):
        groups = [list(range(len(batch)))]
    labels = [math.nan] * len(batch)
    for group in groups:
        rows = [row for row in group if scored[row]]
        low, high = (float(rewards[rows].min()), float(rewards[rows].max())) if rows else (0.0, 0.0)
        for row in rows if low < high else ():
            difference = float(rewards[row] - rewards[rows].mean())
            labels[row] = math.nan if difference == 0 else float(difference > 0)
    return labels


def _of_another_prompt(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each row the row whose response it gets: one with another prompt, or the row before where all have one.

    With rows of a prompt side by side, the rows of the most frequent prompt are a step that leads out of each. Where no
    prompt has more than half of the rows, each response is then taken once: of pairs as many chosen as rejected.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompt = [numbers.setdefault(tuple(tokens), len(numbers)) for tokens in prompts]
    order = sorted(range(len(prompt)), key=prompt.__getitem__)
    step = max(Counter(prompt).values()) if len(numbers) > 1 else 1
    matched = list(order)
    for position, row in enumerate(order):
        other = (position - step) % len(order)
        while len(numbers) > 1 and prompt[order[other]] == prompt[row]:
            other = (other - 1) % len(order)
        matched[row] = order[other]
    return matched
