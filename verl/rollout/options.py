"""Settings of generation: how samples are drawn, and the engine that draws them. Imported without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from verl._base.combinations import conflicts, named
from verl._base.record import (
    AtOnce,
    Count,
    FunctionPath,
    Natural,
    Portion,
    Processes,
    Record,
    Strings,
    cost,
    function_path,
    result,
    wrong,
)
from verl.errors import nearest

ENGINES = ("embedded", "hf", "vllm")
_NAMES = ("auto", *ENGINES)


def _greedy_or_warm(value: float) -> float:
    if value and not 1e-6 <= value <= 1e6:
        raise ValueError(f"must be 0 (greedy) or lie between 1e-06 and 1000000, not {value}")
    return value


Temperature = Annotated[float, AfterValidator(_greedy_or_warm)]


def _engine_name(value: str) -> str:
    if value not in _NAMES and ":" not in value:
        raise ValueError(f"no engine is called '{value}': {nearest(value, _NAMES)}; or give FILE.py:CLASS")
    return value if value in _NAMES else function_path(value)


class RolloutOptions(Record):
    """Generation: the section `actor_rollout_ref.rollout` of a file, `rollout=` of an actor."""

    name: Annotated[str, AfterValidator(_engine_name)] = cost(
        "auto",
        "engine: embedded (on the trained weights themselves), hf (plain generate), vllm, your own, as "
        "FILE.py:CLASS, or auto: vllm on a GPU where it is installed and can do what is set, else embedded",
    )
    episode: FunctionPath | None = result(
        None, "turns, tools or constraints of your own, as FILE.py:NAME (null: a single turn)"
    )
    environment: FunctionPath | None = result(
        None,
        "a class of TRL's form, whose public methods are tools, as FILE.py:CLASS; instead of episode",
        added=True,
    )
    n: AtOnce = result(8, "samples per prompt")
    max_new_tokens: Count = result(128, "longest response, in tokens")
    min_new_tokens: Natural = result(0, "no end of sequence before this many tokens")
    temperature: Annotated[float, Field(ge=1e-6, le=1e6)] = result(
        1.0, "softmax temperature, in generation and in training alike"
    )
    top_k: Natural = result(0, "sample among the k likeliest tokens only (0: off); biases the gradient")
    top_p: Portion = result(1.0, "sample within this probability mass only (1: off); biases the gradient")
    min_p: Annotated[float, Field(ge=0, lt=1)] = result(
        0.0, "drop tokens below this share of the likeliest one (0: off); biases the gradient"
    )
    stop: Strings = result((), "texts that end a response")
    url: Strings = result((), "addresses of running vLLM servers, which generate instead of an engine in this process")
    max_num_seqs: Count = cost(
        256, "sequences that one worker generates at the same time (also: rollout_per_device_batch_size)"
    )
    kv_cache_gb: Annotated[float, Field(gt=0, le=1e6)] | None = cost(
        None, "memory for keys and values, in GB (null: from the memory that is free)"
    )
    batch_invariant: bool = cost(
        False, "a response is the same bit for bit in any batch, at the price of speed (embedded)"
    )
    tensor_model_parallel_size: Count = cost(
        1, "ranks that share one copy of the model in generation (embedded; vllm: processes of its own)"
    )
    overlap_comm: bool = cost(
        False,
        "where training has another layout: weights of a layer arrive while those before it compute (embedded, CPU)",
    )
    num_rollout_workers: Processes = cost(1, "processes that sample, in asynchronous training (trainer.max_staleness)")
    max_rollout_workers: Processes | None = cost(
        None, "most such processes, when training waits for samples (null: always num_rollout_workers)", free=True
    )
    transport: Literal["shared_memory", "queue"] = cost(
        "shared_memory", "how samples and weights travel between processes; the results are the same", free=True
    )
    # No machine without accelerators can tell whether another value works.
    gpus_per_rollout_worker: int | None = cost(
        None,
        "accelerators of one rollout worker (null: the one the model is on)",
        later="only GPUs can show it, and it has not been shown",
    )

    def _check(self) -> None:
        for name, why in conflicts(self.asked()):
            raise wrong(name, why)
        if self.max_rollout_workers is not None and self.max_rollout_workers < self.num_rollout_workers:
            raise wrong("max_rollout_workers", f"must be at least num_rollout_workers ({self.num_rollout_workers})")
        if self.environment is not None and self.episode is not None:
            raise wrong("environment", "is an episode of its own: leave episode out")
        if self.url and self.name not in ("auto", "vllm"):
            raise wrong("url", f"is of vLLM servers: leave rollout.name={self.name} out")
        if self.min_new_tokens > self.max_new_tokens:
            raise wrong("min_new_tokens", f"must be at most max_new_tokens ({self.max_new_tokens})")

    def asked(self) -> dict[str, str]:
        """The settings by the names of `verl._base.combinations`."""
        engine = self.name if self.name in _NAMES else "other engine"
        return named({
            engine: f"'{self.name}'",
            "tensor_model_parallel_size": self.tensor_model_parallel_size > 1,
            "batch_invariant": self.batch_invariant,
            "overlap_comm": self.overlap_comm,
        })  # fmt: skip

    @property
    def tensor_parallel(self) -> int:
        """Ranks of the role that share a copy of the model in generation. vLLM has processes of its own for that, and
        "auto" is never vLLM then."""
        return self.tensor_model_parallel_size if self.name in ("auto", "embedded") else 1

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that are `SamplingParams`' too."""
        names = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
        return {name: getattr(self, name) for name in names}


class SamplerOptions(RolloutOptions):
    """All that makes a rollout engine: `RolloutOptions`, and options that only Python has."""

    name: Any = cost("auto", 'a name, "FILE.py:NAME" of an `EngineFactory`, or such a factory')
    episode: Any = result(
        None, 'what happens between a row and the engine, or "FILE.py:NAME" of it (null: a single turn)'
    )
    episodes: Mapping[str, Any] = result({}, "of tasks, by name, in the place of `episode`")
    seed: int = result(0, "of the run; with a sample's id it fixes the sample's randomness")

    @property
    def kv_memory(self) -> int | None:
        """Bytes of the KV cache."""
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 2**30)
