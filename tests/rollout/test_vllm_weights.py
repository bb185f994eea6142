"""Weights on their way into vLLM, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import ranks
from tests.tensor_memory import TensorMemory
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.transport import in_process
from verl.weights.shard import Shard
from verl.weights.shards import model_shards

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 30, 7, 8], [40, 41, 42], [100] * 70]


def cut(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Weights in pieces that are no rank's: three of the rows, the second of which in two of the columns."""
    for shard in shards:
        for number, rows in enumerate(shard.tensor.chunk(3)):
            low = number * len(shard.tensor.chunk(3)[0])
            columns = rows.chunk(2, 1) if rows.dim() == 2 and number == 1 else [rows]
            for right, block in enumerate(columns):
                at = (low, right * columns[0].shape[1]) if rows.dim() == 2 else (low,)
                yield Shard(shard.name, shard.global_shape, at, block)


def answers(engine: VLLMEngine) -> dict[str, tuple[list[int], list[float]]]:
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    samples: Iterable[Sample] = generate(engine, [Request(f"r{i}", prompt, params) for i, prompt in enumerate(PROMPTS)])
    return {sample.id: (sample.tokens, sample.log_probs) for sample in samples}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_pieces_are_put_together_layer_by_layer(
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    storage: str,
) -> None:
    """After updates by pieces an engine computes the very numbers of a new one, whether it computes with the weights as
    they are loaded (as on a GPU) or packs them. On the way there are one whole weight and vLLM's copies of it."""
    if storage == "plain":

        def keep(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", keep)
    model = make_model(kind, torch.float32)
    found, peak = [], 0
    for versions in (3, 1):
        engine = VLLMEngine(model, tokenizer, eos_token_ids=(2,), seed=0, max_num_seqs=16, kv_memory=1 << 23)
        assert engine._publish is in_process  # the weights are counted in this process
        for version in range(versions):
            if versions > 1:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.02 * torch.randn_like(parameter)
            with TensorMemory() as memory:
                engine.load_shards(cut(model_shards(model)), version)
            peak = max(peak, memory.peak)
        found.append(answers(engine))
        engine.close()
    assert found[0] == found[1]
    assert peak < 3.5 * max(shard.nbytes for shard in model_shards(model))


def test_ranks_that_share_the_trained_model_feed_it_piece_by_piece(make_tiny: Callable[..., Any]) -> None:
    done = ranks.job(2, Path(__file__).with_name("rank_vllm.py"), make_tiny("wide"))
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    (found,) = (line for line in lines if "tokens" in line)
    assert found["tokens"] == found["expected"] and len(found["tokens"]) == 4
    assert max(found["mismatch"]) < 1e-3
    updates = [line for line in lines if "version" in line]
    assert sorted(line["version"] for line in updates) == [0, 0, 1, 1, 2, 2]
    assert max(line["peak"] for line in updates) < 4 * (1 << 14) < found["all"] / 10
