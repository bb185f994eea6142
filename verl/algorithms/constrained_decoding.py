"""Constrained decoding: responses are sampled under a constraint, and those that hold are learned by likelihood.

Rejection sampling fine-tuning as in Dong et al., "RAFT: Reward rAnked FineTuning" (arXiv:2304.06767), with a constraint
in the place of the ranking. Deviations: every response that holds counts alike, and the policy is updated on them once,
in the step that sampled them.
"""

from __future__ import annotations

from typing import ClassVar

from verl.algorithms.registry import register_algorithm
from verl.algorithms.sft import SFT
from verl.batch import Batch


@register_algorithm("constrained_decoding")
class ConstrainedDecoding(SFT):
    """Likelihood of the responses that hold, by default a mean over all tokens. A reward, if there is one, is measured.

    Options:
        learn: False: the constraint alone acts, and nothing is learned.
    """

    roles = frozenset({"actor"})
    online: ClassVar[bool] = True
    needs_constraint: ClassVar[bool] = True
    measures: ClassVar[frozenset[str]] = frozenset({"reward"})
    samples_per_prompt: ClassVar[int] = 4

    learn: bool = True

    @property
    def unread_options(self) -> dict[str, str]:
        unread = dict.fromkeys(
            ("loss_type", "loss_agg_mode", "loss_scale_factor"), "nothing is learned with learn=False"
        )
        return super().unread_options if self.learn else unread

    def prepare(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The rows whose response holds, recorded ones all; `constraint/accepted` is their share."""
        ended = batch["finish"] if "finish" in batch else ["stop"] * len(batch)
        holds = [finish not in ("reject", "abort") for finish in ended]
        accepted = sum(holds) / max(len(holds), 1)
        return batch.filter(holds if self.learn else [False] * len(holds)), {"constraint/accepted": accepted}
