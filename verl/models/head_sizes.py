"""How much of the head is computed at a time, by the memory of the device. Imported without torch."""

from __future__ import annotations

from typing import NamedTuple

from verl._host import device


class HeadSizes(NamedTuple):
    """Elements. They depend on the kind of device, not on its free memory: sums must come in the same order again.

    Attributes:
        chunk: logits that are there at once.
        block: logits that are worked on in full precision at a time.
        gradient: of the head's gradient that are computed at a time.
    """

    chunk: int
    block: int
    gradient: int

    @classmethod
    def of(cls, memory: float | None) -> HeadSizes:
        """For an accelerator with `memory` bytes in all; None: for a CPU."""
        if memory is None:
            return CPU
        # Each operation is a kernel over the whole chunk. With two fp32 copies it takes a fiftieth of the memory.
        chunk = int(memory) // 512
        return cls(chunk, chunk, chunk)

    @classmethod
    def on(cls, where: object) -> HeadSizes:
        """For a device of this machine ("cuda:0" or a `torch.device`)."""
        return cls.of(device.total_memory(str(where))) if device.is_accelerator(str(where)) else CPU

    def work_bytes(self, logits: float, weight: float, itemsize: int) -> int:
        """Peak bytes of a forward and backward pass, without its inputs and results.

        Args:
            logits: of the pass, tokens x vocabulary.
            weight: elements of the head.
            itemsize: bytes of a logit before it is widened.
        """
        chunk = min(self.chunk, logits)
        if self == CPU:  # the kernels work in place, and a block is as small as a cache
            return int(chunk) * itemsize
        # Entropies need two copies: the logits, of which their gradient becomes, and the probabilities.
        copies = 2 * min(self.block, chunk) * max(4, itemsize)
        return int(chunk * itemsize + max(copies, min(self.gradient, weight) * itemsize))


#: 64 MB of logits in bf16: fewer starve the matrix products. Blocks of 4 MB stay in the caches. A whole gradient would
#: take longer than pieces of it, and be of the head's own size.
CPU = HeadSizes(1 << 25, 1 << 20, 1 << 22)
