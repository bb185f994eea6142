"""The sizes that memory depends on: of a model (`verl.planner.memory`), and of the part of its head that is computed
at a time, by the memory of the device. Imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from verl._host import device
from verl.weights.layout import count_of

if TYPE_CHECKING:
    from torch import nn


class ModelSize(NamedTuple):
    """Counts of parameters, layers, heads. `itemsize`: bytes of a live weight; `fused`: see models/llama.py;
    `trained`: of the parameters, None for all; `int4_bytes`: of the weights in 4 bits, which are not parameters;
    `experts`: of a layer, 0 if it is dense."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    itemsize: int
    fused: bool = False
    trained: int | None = None
    int4_bytes: int = 0
    experts: int = 0

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelSize:
        """The size of a live transformers model, or of one on the meta device (which holds no memory)."""
        from torch.nn import Linear

        from verl.kernels.compiled import layer_kernels
        from verl.models.llama import has_llama_shape

        config = model.config.get_text_config()  # type: ignore[union-attr,operator]
        parameters = list(model.parameters())
        heads = count_of(config, "num_attention_heads") or 1  # state-space models have none
        head_dim = count_of(config, "head_dim") or config.hidden_size // heads
        compiled = layer_kernels(parameters[0].dtype, parameters[0].device)
        linear = [module for module in model.modules() if isinstance(module, Linear)]
        return cls(
            parameters=sum(parameter.numel() for parameter in parameters),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=count_of(config, "intermediate_size", "n_inner") or 4 * config.hidden_size,
            heads=heads,
            kv_heads=count_of(config, "num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab=config.vocab_size,
            itemsize=max(parameter.element_size() for parameter in parameters if parameter.dim() > 1),
            fused=compiled is not None and has_llama_shape(getattr(model, "base_model", model), head_dim),
            trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            # A linear layer has buffers where its weight is in 4 bits.
            int4_bytes=sum(buffer.nbytes for layer in linear for buffer in layer.buffers(recurse=False)),
            experts=count_of(config, "num_experts", "num_local_experts", "n_routed_experts"),
        )

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize + self.int4_bytes

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """On each of `tp` ranks; a key-value head is not cut further."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize // min(tp, self.kv_heads)


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
