"""The planner's bytes of training beside those that tensors take."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.tensor_memory import TensorMemory
from tests.training.cases import OPTIM, make_engine, update
from verl.batch import Batch
from verl.models.memory import ModelSize
from verl.planner.memory import ddp, estimate
from verl.weights.layout import Layout

VOCAB = 1000


def batch_of(rows: int, length: int) -> Batch:
    """Half of each row is a prompt of its own."""
    half, random = length // 2, torch.Generator().manual_seed(0)
    prompts, responses = torch.randint(0, VOCAB, (2, rows, half), generator=random).tolist()
    return Batch.from_columns(
        {
            "id": [f"{row}/0" for row in range(rows)],
            "group": [f"g{row}" for row in range(rows)],
            "prompt_tokens": prompts,
            "response_tokens": responses,
            "response_mask": [[1] * half] * rows,
            "advantages": (torch.randn(rows * half, generator=random), [half] * rows),
            "reward": torch.randn(rows, generator=random),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float32, True),
        (torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize(
    ("hidden", "layers", "rows", "length"),
    [
        (128, 4, 2, 64),
        (256, 4, 4, 256),
        (256, 8, 8, 256),
    ],
)
def test_predicted_training_memory_is_that_of_one_process(
    hidden: int, layers: int, rows: int, length: int, dtype: torch.dtype, checkpointing: bool
) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    batch = batch_of(rows, length)
    with TensorMemory() as memory:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        engine = make_engine(model, optim=OPTIM, gradient_checkpointing=checkpointing)
        update(engine, batch)
        kept = memory.peak = memory.now
        update(engine, batch)
    size = ModelSize.from_model(model)
    usage = estimate(size, ddp(size.itemsize), Layout(), rows * length, checkpointing=checkpointing)
    assert usage.resting == pytest.approx(kept, rel=0.01)
    assert usage.peak == pytest.approx(memory.peak, rel=0.15)
