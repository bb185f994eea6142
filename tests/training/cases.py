"""Tiny models, ragged batches and a loss that uses all of them, for tests of the engines that train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.exact import norm_in_fp64
from verl.algorithms.loss_terms import Loss, LossFn, LossInput, LossNeeds, LossTerm
from verl.batch import Batch
from verl.training.engine import TrainEngine
from verl.training.options import EngineOptions, Head, OptimConfig
from verl.training.torch_engine import TorchEngine

VOCAB = 37


def tiny_model(kind: str = "llama", dtype: torch.dtype = torch.float64, layers: int = 2) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    wide = {**sizes, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = {
        "llama": lambda: LlamaConfig(**wide, tie_word_embeddings=False),
        "qwen2": lambda: Qwen2Config(**wide, tie_word_embeddings=True),
        # Norms of heads, and heads of another size than the hidden size gives.
        "qwen3": lambda: Qwen3Config(**wide, head_dim=12, tie_word_embeddings=False),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **wide, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
        ),
        "mixtral": lambda: MixtralConfig(**wide, num_local_experts=4),
        # A window in the last layer alone.
        "window": lambda: Qwen2Config(**wide, use_sliding_window=True, sliding_window=3, max_window_layers=layers - 1),
        # A head with a bias; fused matrices that are cut but whole where they are used, and a token for padding.
        "phi": lambda: PhiConfig(**wide),
        "phi3": lambda: Phi3Config(**wide, pad_token_id=20),
        "gemma": lambda: GemmaConfig(**wide, head_dim=8),
        # GPT-2 ties its head to its embedding and has dropout.
        "gpt2": lambda: GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=layers, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        ),
        # Falcon's layers read a dropout from the configuration.
        "falcon": lambda: FalconConfig(**sizes, attention_dropout=0.4, hidden_dropout=0.4),
        # The router noise of Phi's experts decides in evaluation too which of them count.
        "phimoe": lambda: PhimoeConfig(**wide, num_local_experts=4, router_jitter_noise=0.4, input_jitter_noise=0.4),
    }[kind]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if dtype == torch.float64:
        norm_in_fp64(model)
        if kind in ("qwen3_moe", "mixtral"):
            model.set_experts_implementation("eager")  # grouped products have no fp64
    return model.eval()


def ragged_batch(rows: Sequence[tuple[int, int]], seed: int = 0) -> Batch:
    """Rows (prompt number, response length): prompt p has p + 1 tokens, and is shared by the rows that name it."""
    random = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=random).tolist()

    prompts = {p: tokens(p + 1) for p in range(8)}
    lengths = [length for _, length in rows]
    total = sum(lengths)
    return Batch.from_columns(
        {
            "id": [f"{p}/{i}" for i, (p, _) in enumerate(rows)],
            "group": [f"g{p}" for p, _ in rows],
            "prompt_tokens": [prompts[p] for p, _ in rows],
            "response_tokens": [tokens(length) for length in lengths],
            "response_mask": [[int(t % 5 != 3) for t in range(length)] for length in lengths],
            "advantages": (torch.randn(total, generator=random, dtype=torch.float64), lengths),
            "reward": torch.randn(len(rows), generator=random, dtype=torch.float64),
        }
    )


def forked_batch(seed: int = 1) -> Batch:
    """Trajectories of a group that fork in three levels, some with a longer prompt than others; one of them is the
    beginning of others, and one has another prompt. Then a prompt with two samples, and one with one."""
    random = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=random).tolist()

    p, x, y, q = tokens(6), tokens(10), tokens(9), tokens(5)
    rows = [  # group, prompt, what it repeats of others, what it adds
        ("a", p, [], x + y + tokens(7)),
        ("a", p, x + y, tokens(5)),
        ("a", p + x, [], tokens(8)),
        ("a", p + x + y[:4], [], tokens(6)),
        ("a", p, [], tokens(4)),
        ("b", q, [], tokens(6)),
        ("a", tokens(7), [], tokens(3)),
        ("a", p, x[:5], x[5:]),
        ("a", p + x, y[:4], tokens(6)),
        ("b", q, [], tokens(3)),
        ("c", tokens(4), [], tokens(9)),
    ]
    lengths = [len(old + new) for _, _, old, new in rows]
    return Batch.from_columns(
        {
            "id": [str(row) for row in range(len(rows))],
            "group": [group for group, *_ in rows],
            "prompt_tokens": [prompt for _, prompt, _, _ in rows],
            "response_tokens": [old + new for _, _, old, new in rows],
            "response_mask": [[0] * len(old) + [int(t % 4 != 2) for t in range(len(new))] for *_, old, new in rows],
            "advantages": (torch.randn(sum(lengths), generator=random, dtype=torch.float64), lengths),
            "reward": torch.randn(len(rows), generator=random, dtype=torch.float64),
        }
    )


def distinct_beginnings(batch: Batch) -> int:
    """Tokens of a forward that computes each beginning of the rows of a group once, counted one by one."""
    seen = set()
    for group, prompt, response in zip(batch["group"], batch["prompt_tokens"], batch["response_tokens"], strict=True):
        fed = prompt + response[:-1]
        seen |= {(group, *fed[:end]) for end in range(1, len(fed) + 1)}
    return len(seen)


def token_weights(batch: Batch) -> torch.Tensor:
    mask = batch.tensor("response_mask").double()
    return mask / mask.sum().clamp(min=1)


def policy_loss(x: LossInput) -> Loss:
    """Uses everything that a split could get wrong: weights, columns by token and row, per-row sums, totals."""
    assert x.log_probs is not None
    per_token = -x.log_probs * x.columns["advantages"] + 0.1 * x.log_probs.square()
    if x.entropy is not None:
        per_token = per_token - 0.3 * x.entropy
    by_row = x.sum_by_sequence(x.log_probs * x.mask)
    total = (x.weights * per_token).sum() + (by_row * x.columns["reward"]).sum() / x.total_sequences
    return Loss(
        total=total,
        metrics={"tokens": float(x.mask.sum()) / max(x.total_tokens, 1), "rows/max": float(x.num_sequences)},
    )


ROWS = [(3, 5), (3, 9), (0, 1), (5, 0), (3, 2), (5, 7), (1, 4)]
OPTIM = OptimConfig(lr=1e-2, betas=(0.9, 0.95), adam_eps=1e-8, weight_decay=0.01, max_grad_norm=0.5)


def make_engine(model: Any, head: Head = "lm", **options: Any) -> TorchEngine:
    return TorchEngine(model, EngineOptions(**options), head=head)


def part(batch: Batch, loss_fn: LossFn = policy_loss, weights: Tensor | None = None, **needs: Any) -> LossTerm:
    needs = {"columns": ["advantages", "reward", "group"], **needs}
    return LossTerm(batch, loss_fn, token_weights(batch) if weights is None else weights, LossNeeds(**needs))


def update(engine: TrainEngine, batch: Batch, loss_fn: LossFn = policy_loss, **options: Any) -> dict[str, float]:
    return engine.update([part(batch, loss_fn, **options)])


def log_probs(engine: TrainEngine, batch: Batch, temperature: float = 1.0) -> Tensor:
    return engine.predict(batch, ("log_probs",), temperature=temperature)["log_probs"]


def state_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {shard.name: shard.tensor for shard in engine.state()[0]}


def gradients(engine: TorchEngine, batch: Batch, **options: Any) -> dict[str, Tensor]:
    """The accumulated gradients that one update would step with; the weights stay."""
    return gradients_of(engine, [part(batch, **options)])


def gradients_of(engine: TorchEngine, parts: Sequence[LossTerm]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    class Spy:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

        def step(self, grad_norm: float) -> None:
            assert math.isfinite(grad_norm)
            found.update({w.name: w.gradient.clone() for w in self.optimizer.gradients.weights if w.has_gradient})

    assert engine.optimizer is not None
    optimizer = engine.optimizer
    engine.optimizer = Spy(optimizer)  # type: ignore[assignment]
    try:
        engine.update(parts)
    finally:
        engine.optimizer = optimizer
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    """Every gradient agrees within `tolerance` of its largest element."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert (x - b[name]).abs().max() <= tolerance * max(float(x.abs().max()), 1e-3), name
