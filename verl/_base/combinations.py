"""Incompatible options: the one table of settings, layouts and models that do not go together.

Records read it when they are made, handles before they start anything, engines before they lay a model out. Imported
without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.errors import ConfigError

_SIZES = ("pp", "sp", "ep", "tp")

#: What is asked for, what it does not go with, and why; {0} and {1} are how the two are written in a message.
NOT_TOGETHER: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # Strategies and layouts.
    ("megatron", ("sp", "ep", "shard"), "{0} cuts by tensor and pipeline, not by {1}: use 'ddp' or 'fsdp'"),
    ("deepspeed", _SIZES, "{0} shares a model by ZeRO alone, not with {1}: use 'fsdp'"),
    ("ep", ("tp",), "layout: experts are cut by ep or by tp, not by both: use tp=1 or ep=1"),
    ("use_torch_compile", ("fsdp", "deepspeed", "megatron", *_SIZES),
     "{0} is for whole layers (strategy 'ddp' or 'single'), not with {1}"),
    ("use_torch_compile", ("padded rows",), "{0} is for packed rows, and {1}: leave it out"),
    ("sp", ("padded rows",), "layout: {0} cuts packed sequences at the attention, and {1}"),
    ("fsdp_config", ("single", "ddp", "deepspeed", "megatron"), "{0} is for strategy 'fsdp', and this is {1}"),
    ("deepspeed_config", ("single", "ddp", "fsdp", "megatron"), "{0} is for strategy 'deepspeed', and this is {1}"),
    ("gathered weights", ("one data-parallel rank",),
     "fsdp_config.param_offload and mixed_precision are of {0}, and here is {1}: leave them out (or set use_amp)"),
    ("single", ("several ranks",), "{0} trains on one rank, and there are {1}: use 'ddp' or 'fsdp'"),
    # What trains: DeepSpeed's ZeRO or Megatron's layers on ranks that share a model, shards, or parts of any kind.
    ("ZeRO 3", ("adapters",), "{0} trains no {1}: give zero_stage 1 or 2, or use 'fsdp'"),
    ("ZeRO 3", ("other ranks",), "{0} takes {1}: give it all of them, zero_stage 1 or 2, or 'fsdp'"),
    ("optimizer", ("ZeRO", "Megatron"), "{1} makes its {0}: give optim=OptimConfig(...), or use 'ddp'"),
    ("use_amp", ("ZeRO", "Megatron"), "{1} computes in model.dtype: leave {0} out, or use 'fsdp'"),
    ("ZeRO", ("moments in bfloat16",), "{0} keeps the optimizer's moments in float32: leave optim.moments out"),
    ("decay of matrices", ("ZeRO", "Megatron"),
     "optim.weight_decay_on=matrices is not done by {1}, which steps flat pieces: use 'ddp' or 'fsdp'"),
    ("ZeRO", ("float64", "float16", "several dtypes"),
     "{0} trains weights that are all float32 or all bfloat16, not {1}: give model.dtype=float32, or use 'fsdp'"),
    ("Megatron", ("padding",), "{0} computes packed rows: leave use_remove_padding out, or use 'ddp'"),
    ("Megatron", ("adapters", "frozen weights"),
     "{0} trains all weights of a model: adapters (LoRA) and frozen weights are for 'ddp' and 'fsdp'"),
    ("Megatron", ("not Megatron",), "{0}: its layers have no {1}: use 'ddp' or 'fsdp'"),
    ("shard", ("moments in bfloat16",), "strategy 'fsdp' keeps moments in float32: leave optim.moments out"),
    ("parts", ("live optimizer",), "your own {1} holds whole weights, and ranks have parts of them here: {0}"),
    ("Ray", ("live optimizer",), "your own {1} holds tensors of this process and cannot train in another: {0}"),
    # Models.
    ("adapted experts", ("tp", "ep"), "layout: {0} (LoRA) are not cut by tp or ep: name lora.targets without them"),
    ("use_amp", ("float64",), "{0} multiplies weights of float32 in bfloat16, and these are {1}: leave it out"),
    ("gradient checkpointing", ("no recomputation",), "{1} has no {0}: set enable_gradient_checkpointing=false"),
    ("training", ("nothing to train",), "no weight of the model requires a gradient: there is nothing to train"),
    ("training", ("other dtype",), "weights of dtype {1} cannot be trained: load the model in bf16 or fp32"),
    ("training", ("no end",), "optim.schedule={1} decays to zero: set optim.total_steps"),
    # Generation, by the settings of the section; the engine "embedded" takes them all.
    ("tensor_model_parallel_size", ("hf",), "the engine {1} does not split a model; embedded and vllm do"),
    ("batch_invariant", ("hf", "vllm", "other engine"), "is for the embedded engine, not {1}"),
    ("overlap_comm", ("hf", "vllm", "other engine"), "is for the embedded engine, not {1}"),
    ("overlap_comm", ("accelerator",),
     "rollout.{0} is for ranks on a CPU: on {1} all weights arrive before the first forward: leave it out"),
    ("vllm", ("float64", "int4"), "vLLM has no {1}: use float32, bfloat16 or float16"),
    ("batch_invariant", ("no paged forward",), "rollout.{0} takes the embedded engine, and {1} has no forward for it"),
    ("tensor_model_parallel_size", ("no paged forward",),
     "rollout.{0}: {1} has no paged forward, which generation by tensor parallelism takes: leave it out"),
    ("responses", ("value", "score"), "a model with a '{1}' head writes no responses"),
)  # fmt: skip
#: What to do with an optimizer object where ranks need one of their own.
MAKE = "give a function that makes it (optim=lambda weights: ...), or optim={'lr': ...}"


def named(asked: Mapping[str, str | bool]) -> dict[str, str]:
    """The requested options: name in the table -> its name in a message; True: the same."""
    return {name: name if text is True else str(text) for name, text in asked.items() if text}


def conflicts(asked: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Requested options that exclude each other, and why.

    Args:
        asked: name in the table -> how it is written in a message.
    """
    for one, others, why in NOT_TOGETHER:
        for other in others if one in asked else ():
            if other in asked:
                yield one, why.format(asked[one], asked[other])


def check(asked: Mapping[str, str]) -> None:
    """Refuse options that exclude each other.

    Raises:
        ConfigError: two of `asked` (see `conflicts`) exclude each other.
    """
    for _, why in conflicts(asked):
        raise ConfigError(why)
