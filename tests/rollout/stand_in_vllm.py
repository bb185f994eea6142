"""A stand-in for vLLM on a GPU, on which engines can sleep. It computes with a model of transformers, records what it
is told, and fails where memory is used that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

Part = SimpleNamespace


class LLM:
    """`vllm.LLM`, with one worker in this process, and `llm_engine` of it. Greedy.

    Attributes:
        calls: of sleep, wake_up and updates, in order.
        broken: an update fails at its end.
    """

    made: ClassVar[list[LLM]] = []

    def __init__(self, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options["model"])).eval()
        self.calls: list[str] = []
        self.broken = False
        self.served: int | None = None
        self.memory = {"weights", "kv_cache"}
        self.requests: dict[str, tuple[list[int], Any]] = {}
        self.llm_engine = self
        self.vllm_config = Part(model_config=Part(enable_sleep_mode=options["enable_sleep_mode"]))
        self.made.append(self)

    def collective_rpc(self, name: str) -> list[Any]:
        if name == "verl_dropped":
            self.served = None
        is_v1 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"  # V2, the default, has another sampler
        return [{"scaled": is_v1, "version": self.served}]

    def sleep(self, level: int) -> None:
        assert self.memory == {"weights", "kv_cache"} and not self.requests
        self.calls.append(f"sleep {level}")
        self.memory.clear()
        if level == 2:
            self._fill(float("nan"))

    def wake_up(self, tags: Sequence[str]) -> None:
        assert not self.memory & set(tags), "memory is mapped twice"
        self.calls.append(f"wake {' '.join(tags)}")
        self.memory |= set(tags)

    def start_weight_update(self) -> None:
        assert "weights" in self.memory
        self.calls.append("update")

    @torch.no_grad()
    def update_weights(self, request: Mapping[str, Any]) -> None:
        weights, state = request["update_info"]["weights"], self.model.state_dict()
        self.served = None
        for shard in weights["shards"]:
            sides = zip(shard.offset, shard.tensor.shape, strict=True)
            state[shard.name][tuple(slice(low, low + size) for low, size in sides)] = shard.tensor

    def finish_weight_update(self, version: str) -> None:
        if self.broken:
            raise RuntimeError("the update is broken")
        self.served = int(version)

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        assert "kv_cache" in self.memory

    def add_request(self, name: str, prompt: Mapping[str, Any], params: Any) -> None:
        self.requests[name] = (list(prompt["prompt_token_ids"]), params)

    def step(self) -> list[Any]:
        assert self.memory == {"weights", "kv_cache"}, "it computes without memory"
        done = [self._output(name, *request) for name, request in self.requests.items()]
        self.requests.clear()
        return done

    @torch.no_grad()
    def _output(self, name: str, prompt: list[int], params: Any) -> Any:
        tokens, scores = list(prompt), []
        for _ in range(params.max_tokens):
            scores.append(self.model(torch.tensor([tokens])).logits[0].log_softmax(-1))
            assert not scores[-1].isnan().any(), "weights that were dropped are served"
            tokens.append(int(scores[-1][-1].argmax()))
        own = tokens[len(prompt) :]
        log_probs = [float(score[-1][token]) for score, token in zip(scores, own, strict=True)]
        completion = Part(
            token_ids=own, finish_reason="length", stop_reason=None, text="", logprobs=Part(logprobs=log_probs)
        )
        past = [{token: Part(logprob=float(scores[0][at][token]))} for at, token in enumerate(prompt[1:])]
        return Part(request_id=name, finished=True, outputs=[completion], prompt_logprobs=[None, *past])

    def _fill(self, value: float) -> None:
        for weight in self.model.parameters():
            weight.data.fill_(value)


class Platform:
    """vLLM's for a GPU, here of the device that there is."""

    device_type = "cpu"

    def is_cpu(self) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True


def modules() -> dict[str, Any]:
    """What is imported of vLLM, by module."""
    LLM.made.clear()
    params = Part(RequestOutputKind=Part(FINAL_ONLY=2), StructuredOutputsParams=None)
    return {
        "vllm": Part(LLM=LLM, SamplingParams=Part, TokensPrompt=dict),
        "vllm.platforms": Part(current_platform=Platform()),
        "vllm.sampling_params": params,
    }
