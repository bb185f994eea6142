"""Which samples are the policy's own: those that its weights, as they are now, have written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

from verl.batch import Batch

#: Samples that are remembered of one version of the weights. Nobody trains on so many at once.
_MANY = 2**20


class Written:
    """A sample is known again by its tokens and their log-probs, which other weights do not have: neither its id nor
    its `policy_version` tells it from a sample of another actor, or of weights that were replaced."""

    def __init__(self, marks: Iterable[str] = ()) -> None:
        self.marks = set(marks)

    def add(self, samples: Batch) -> None:
        if len(self.marks) > _MANY:
            self.marks.clear()
        self.marks.update(_marks(samples))

    def has(self, samples: Batch) -> bool:
        """Whether all of them are among these; no samples are not."""
        if not len(samples) or "rollout_log_probs" not in samples:
            return False
        return self.marks.issuperset(_marks(samples))


def _marks(samples: Batch) -> Iterator[str]:
    tokens = samples.tensor("response_tokens").numpy()
    log_probs = samples.tensor("rollout_log_probs").numpy()
    start = 0
    for length in samples.lengths("response_tokens"):
        row = slice(start, start + length)
        yield blake2b(tokens[row].tobytes() + log_probs[row].tobytes(), digest_size=8).hexdigest()
        start += length
