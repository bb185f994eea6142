"""How much memory a model will need. Imported without torch.

It is computed from the model's shape: what the optimizer owns exactly, activations by counting
what the backward of a layer with gated MLP and rotary attention keeps (other layers keep less), or of a fused
layer of a Llama-shaped model on CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from verl.models.head_sizes import CPU, HeadSizes

if TYPE_CHECKING:
    from torch import nn

from verl.weights.layout import count_of


class ModelSize(NamedTuple):
    """What the memory of a model depends on. `itemsize`: bytes of a live weight; `fused`: see models/llama.py;
    `trained`: of the parameters, None for all; `int4_bytes`: of the weights in 4 bits, beside the parameters;
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

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def activation_bytes(self, tp: int = 1) -> float:
        """What one layer keeps of one token for its backward, on each of `tp` ranks: tensor parallelism cuts attention
        and MLP, but not the norms."""
        # A norm keeps its input in fp32, its normalised input and its output.
        norms = 2 * self.hidden * (self.itemsize if self.fused else 4 + 2 * self.itemsize)
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return norms + (attention + (2 if self.fused else 4) * self.intermediate) * self.itemsize / tp


class MemoryEstimate(NamedTuple):
    """Bytes, by what they are for."""

    weights: int
    masters: int = 0
    moments: int = 0
    gradients: int = 0
    activations: int = 0
    head: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = [f"{name} {amount / 1e9:.2f}" for name, amount in self._asdict().items() if amount]
        return f"{self.total / 1e9:.2f} GB ({', '.join(parts)})"


def estimate_memory(
    size: ModelSize,
    *,
    micro_batch_tokens: int = 0,
    kv_tokens: int = 0,
    trained: bool = True,
    gradient_checkpointing: bool = False,
    moments: str | None = None,
    cut_over: int = 1,
    head: HeadSizes = CPU,
) -> MemoryEstimate:
    """Bytes that a model needs at its peak.

    Args:
        micro_batch_tokens: tokens of the largest forward with a backward (a shared prompt counts once).
        kv_tokens: tokens that the KV cache of generation holds.
        trained: with AdamW: two moments, an fp32 sum of gradients and, for weights under fp32, what they lack of an
            fp32 master.
        moments: dtype of the moments of weights under fp32; by default that of the weights.
        cut_over: ranks that each train a part (FSDP), all of it in fp32 or more, beside a whole copy for generation.
        head: sizes of the device that it is trained on.
    """
    weights = size.weight_bytes
    cache = kv_tokens * size.kv_bytes_per_token
    if not trained:
        return MemoryEstimate(weights, kv_cache=cache)
    count = size.parameters if size.trained is None else size.trained
    full = count * max(4, size.itemsize)
    moment = full if moments == "float32" or cut_over > 1 else count * size.itemsize
    layer = micro_batch_tokens * int(size.activation_bytes())
    inputs = micro_batch_tokens * size.hidden * size.itemsize
    return MemoryEstimate(
        weights,
        masters=size.parameters * max(4, size.itemsize) // cut_over if cut_over > 1 else full - count * size.itemsize,
        moments=2 * moment // cut_over,
        gradients=full // cut_over,
        activations=size.layers * inputs + layer if gradient_checkpointing else size.layers * layer,
        head=head.work_bytes(micro_batch_tokens * size.vocab, size.vocab * size.hidden, size.itemsize),
        kv_cache=cache,
    )
