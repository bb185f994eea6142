"""Every kind of causal language model that transformers can make small is computed as it computes it, or refused."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import verl
from tests.conftest import byte_tokenizer
from tests.ranks import alone
from verl.errors import VerlError
from verl.weights.layout import count_of

SIZES = {
    **{"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}
BY_LAYER = {"vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8, "sliding_window": 8}
#: Of kinds that these sizes do not make, or not small.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**BY_LAYER, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16, "sliding_window": 8},
    "gemma3n_text": {
        **BY_LAYER,
        **{"num_hidden_layers": 6, "laurel_rank": 4, "num_kv_shared_layers": 2, "intermediate_size": [48] * 6},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 6},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
}
MOST = 30_000_000
GEMMA = ["gemma4_text", "gemma3n_text"]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def make(kind: str) -> Any:
    """A small model; None: these settings make none that transformers itself computes and generates with."""
    try:
        with within(120):
            config = CONFIG_MAPPING[kind](**{**SIZES, **OTHERS.get(kind, {})})
            with torch.device("meta"):
                size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
            if size > MOST:
                return None
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7, 8]]))
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
            return model
    except Exception:
        return None


@torch.no_grad()
def off(model: Any, samples: verl.Batch, log_probs: verl.Batch) -> float:
    """How far log-probs of responses are from those of the model's own forward, row by row."""
    farthest = 0.0
    rows = zip(samples["prompt_tokens"], samples["response_tokens"], log_probs["log_probs"], strict=True)
    for prompt, response, found in rows:
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        farthest = max(farthest, float((own - torch.tensor(found)).abs().max()))
    return farthest


def judge(kind: str) -> dict[str, Any]:
    """What becomes of a kind: "none", "refused", "right", or the fault."""
    if (model := make(kind)) is None:
        return {"kind": kind, "is": "none"}
    try:
        with within(300):
            actor = verl.Actor(model=model, tokenizer=byte_tokenizer(), optim={"lr": 1e-3}, algorithm="grpo")
            samples = actor.generate_sequences([[5, 6, 7], [8] * 9], n=2, max_new_tokens=6)
            distance = off(model, samples, actor.compute_log_probs(samples))
            sampled = max(
                abs(a - b)
                for ours, theirs in zip(
                    samples["rollout_log_probs"], actor.compute_log_probs(samples)["log_probs"], strict=True
                )
                for a, b in zip(ours, theirs, strict=True)
            )
            trained = actor.update(samples, [1.0, 0.0, 0.0, 1.0])
    except VerlError as error:
        return {"kind": kind, "is": "refused", "why": str(error)}
    except Exception as error:
        return {"kind": kind, "is": f"{type(error).__name__}: {error}"[:300]}
    right = distance < 1e-3 and sampled < 1e-3 and math.isfinite(trained["grad_norm"])
    return {"kind": kind, "is": "right" if right else f"off by {distance:.2g}, in generation by {sampled:.2g}"}


@pytest.mark.parametrize(
    "kinds",
    [GEMMA, *(pytest.param(part, marks=pytest.mark.slow) for part in ("0/4", "1/4", "2/4", "3/4"))],
    ids=str,
)
def test_a_kind_of_model_is_right_or_refused_by_name(kinds: list[str] | str) -> None:
    if isinstance(kinds, str):
        number, parts = map(int, kinds.split("/"))
        kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[number::parts]
    done = alone(Path(__file__), *kinds)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind')]
    assert [one["kind"] for one in found] == kinds
    for one in found:
        print(one)
    assert {one["kind"]: one["is"] for one in found if one["is"] not in ("right", "refused", "none")} == {}
    if kinds == GEMMA:
        assert all(one["is"] == "right" for one in found), found
    assert sum(one["is"] != "none" for one in found) > len(kinds) / 2


def test_counts_that_differ_by_layer_are_what_divides_them() -> None:
    config = CONFIG_MAPPING["gemma4_text"](**{**SIZES, **OTHERS["gemma4_text"], "global_head_dim": 20})
    assert count_of(config, "head_dim") == 4 and count_of(config, "nothing", "num_attention_heads") == 4
    assert count_of(config, "nothing") == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        sys.stdout.write(json.dumps(judge(name)) + "\n")
        sys.stdout.flush()
