"""Check after each transfer of weights that the rollout engine computes with the trained ones.

Engines with their own copy of the weights acknowledge its version. Where an engine can `score`, it and the trainer also
score a few samples of the latest rollout. The mean |difference| of their log-probs, in nats a token, may be twice what
it was when the engine was new (a few hundredths in half precision), or `SLACK`.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.batch import Batch
from verl.errors import RolloutError
from verl.training.engine import TrainEngine

ROWS = 4
SLACK = 1e-3
FRESH_LIMIT = 0.1


class SyncCheck:
    """Compares the log-probs of an engine and the trainer on the samples in `probe`."""

    #: A few of the latest rollout's first samples.
    probe: Batch | None = None
    _fresh: float | None = None

    def measure(self, engine: Any, trainer: TrainEngine) -> dict[str, float]:
        """`sync/mismatch` and `sync/mismatch/max`; empty without a probe.

        Raises:
            RolloutError: the engine computes with other weights than the trainer.
        """
        probe = self.probe
        if probe is None or not sum(probe.lengths("response_tokens")):
            return {}
        ours = trainer.predict(probe, ("log_probs",))["log_probs"].double()
        rows = zip(probe["prompt_tokens"], probe["response_tokens"], strict=True)
        theirs = torch.tensor([score for prompt, response in rows for score in engine.score(prompt, response)])
        difference = (ours - theirs.double()).abs()
        mean = float(difference.mean())
        limit = FRESH_LIMIT if self._fresh is None else max(SLACK, 2 * self._fresh)
        if not mean <= limit:
            raise RolloutError(
                f"the rollout engine computes with other weights than the trainer: log-probs of the same samples "
                f"differ by {mean:.2g} nats a token, at most {limit:.2g} is expected. An update of its weights was "
                "lost or is incomplete (tied weights?)"
            )
        if self._fresh is None:
            self._fresh = mean
        return {"sync/mismatch": mean, "sync/mismatch/max": float(difference.max())}
