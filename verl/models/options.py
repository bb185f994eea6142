"""Settings of a model: what is loaded, and how its layers run. Imported without torch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from verl._base.record import Count, Record, Strings, cost, limit, result, wrong

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


#: Makes a dtype's name the one that torch has: "bfloat16" of "bf16".
FULL_NAME = BeforeValidator(lambda dtype: _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype)
Dtype = Annotated[Literal["auto", "float64", "float32", "bfloat16", "float16", "int4"], FULL_NAME]
#: The full names of dtypes, as settings have them.
DTYPES: tuple[str, ...] = get_args(get_args(Dtype)[0])


class FusedKernelOptions(Record):
    impl_backend: str | None = cost(
        None,
        "which fused kernels to use: compiled (ours, for CPU); any other name, such as xformers, means the "
        "nearest available, with a warning (null: what is available)",
    )


class LoraOptions(Record):
    """Adapters of low rank, which are trained instead of the weights."""

    r: Count = result(16, "rank of the adapters")
    alpha: float = result(32.0, "their output is multiplied by alpha / r", gt=0)
    targets: Strings = result(
        ("all-linear",), "names of the layers that get adapters, such as q_proj (all-linear: all but the output layer)"
    )


class ModelOptions(Record):
    """A model by name or directory: the sections `model` of a file."""

    path: str | None = result(None, "model directory or hub name (for a critic, null: the actor's model)")
    tokenizer: str | None = result(None, "tokenizer directory or hub name (null: the one beside the model)")
    dtype: Dtype = result(
        "auto",
        "precision of the weights (auto: as in the files; float32 on a CPU without bf16; int4: of the base of a LoRA)",
    )
    lora: LoraOptions | None = result(
        None,
        "train adapters instead of the weights, by peft: {r: 16, alpha: 32, targets: all-linear}, the "
        "defaults, or lists of layers by name as targets (null: train the weights)",
    )
    max_position_embeddings: Count | None = limit(
        None,
        "longest prompt and response together (null: what the model's config says); an export has the config's own, "
        "unless the model's outputs depend on it",
        added=True,
    )
    trust_remote_code: bool = limit(False, "run Python code that comes with the model")
    enable_gradient_checkpointing: bool = cost(
        False, "recompute activations in the backward pass: less memory, about a third slower"
    )
    use_remove_padding: bool = cost(
        True, "train on packed sequences (false: on padded rows, through transformers' own forward)"
    )
    use_fused_kernels: bool = cost(
        True,
        "run a model's layers by fused kernels where its architecture, device and dtype (bfloat16 or "
        "float32) have some",
    )
    fused_kernel_options: FusedKernelOptions = Field(FusedKernelOptions(), description="options of the fused kernels")

    @property
    def fused_kernels(self) -> bool | str:
        """The setting as `PackedModel(fused_kernels=...)` takes it."""
        return self.use_fused_kernels and (self.fused_kernel_options.impl_backend or True)

    def _check(self) -> None:
        if self.dtype == "int4" and self.lora is None:
            raise wrong("dtype", "weights in int4 are not trained: set lora, to train adapters over them")
        if not self.use_fused_kernels and self.fused_kernel_options.impl_backend is not None:
            raise wrong("fused_kernel_options.impl_backend", "needs use_fused_kernels=true")
