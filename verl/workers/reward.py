"""A reward model on one rank: it scores token ids."""

from __future__ import annotations

from verl.batch import Batch
from verl.cluster.rank_context import ALONE, RankContext, dispatch
from verl.models.portable import PortableModel
from verl.rewards.model import TokenScorer
from verl.workers.trained import model_of_rank


class RewardWorker:
    """A sequence classifier, whole on each rank of its role."""

    def __init__(self, model: PortableModel, batch_size: int, *, context: RankContext = ALONE) -> None:
        live, _ = model_of_rank(model, context)
        self._score = TokenScorer(live.requires_grad_(False), batch_size, context.device)

    @dispatch("train", split="rows", collect="rows")
    def scores(self, batch: Batch) -> Batch:
        """Column `scores`: a number for the text of each row's `prompt_tokens`."""
        return Batch.from_columns({"scores": self._score(batch["prompt_tokens"])})
