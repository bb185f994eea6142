"""What a layout, a strategy or an engine accepts works: an actor trains, generates, is saved, exported and loaded
elsewhere as in one process, or it is refused before anything starts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests import ranks
from tests.conftest import IDS, byte_tokenizer

SCRIPT = Path(__file__).with_name("rank_cells.py")
ODD = {**IDS, "vocab_size": 259}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, Callable[[], Any]] = {
    # 9 heads and 3 key-value heads: two ranks cannot share them.
    "nine heads": lambda: LlamaConfig(
        **ODD, **SIZES | {"hidden_size": 36}, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    # Two key-value heads for each of two ranks.
    "groups": lambda: LlamaConfig(
        **ODD, **SIZES, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "tied": lambda: Qwen2Config(**ODD, **SIZES, **HEADS, tie_word_embeddings=True),
    "experts": lambda: Qwen3MoeConfig(**ODD, **SIZES, **HEADS, **EXPERTS, norm_topk_prob=True),
    "gpt2": lambda: GPT2Config(**ODD, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def zero(stage: int) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed_config": {"zero_stage": stage}}


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
MEGATRON = {"strategy": "megatron"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "fsdp", "fsdp_config": {"fsdp_size": 2}},
    "tp": TENSOR,
    "pp": PIPELINE,
    "tp x pp": TENSOR | PIPELINE,
    "fsdp x tp": {"strategy": "fsdp"} | TENSOR,
    "ulysses": {"ulysses_sequence_parallel_size": 2},
    "ulysses 4": {"ulysses_sequence_parallel_size": 4},
    "experts": {"expert_parallel_size": 2},
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "megatron tp": MEGATRON | TENSOR,
    "megatron pp": MEGATRON | PIPELINE,
    "megatron tp x pp": MEGATRON | TENSOR | PIPELINE,
}
#: Settings of generation, and where it is.
ROLLOUTS: dict[str, dict[str, Any]] = {
    "same": {},
    "tensor": {"rollout": {"tensor_parallel_size": 2}},
    "tensor, overlapped": {"rollout": {"tensor_parallel_size": 2, "overlap_comm": True}},
    "hf": {"rollout": {"rollout": "hf"}},
    "apart": {"placement": {"actor": "cpu:0-1", "rollout": "cpu:2-3"}},
    "apart, tensor": {
        "placement": {"actor": "cpu:0-1", "rollout": "cpu:2-3"},
        "rollout": {"tensor_parallel_size": 2},
    },
}
#: Of the walk, each within the time of a test.
PARTS = 8
AXES: list[list[Any]] = [[*STRATEGIES], [*MODELS], [*ROLLOUTS], [False, True]]
Cell = tuple[str, str, str, bool]
#: Of 2 ranks; the first of each is in `make test`.
OF_TWO: dict[str, list[Cell]] = {
    "megatron": [("megatron pp", "tied", "tensor", False), ("zero 3", "tied", "same", True)],
    "zero": [("zero 3", "tied", "same", False)],
}
#: Found broken, or made for a reason; of 4 ranks.
CHOSEN: list[Cell] = [
    ("megatron tp", "groups", "same", False),
    ("ulysses", "tied", "tensor", True),
    ("megatron tp x pp", "groups", "same", False),
    ("megatron tp", "groups", "apart, tensor", False),
    ("zero 3", "nine heads", "apart", False),
    ("ulysses 4", "tied", "tensor", False),
    ("pp", "gpt2", "tensor", False),
    ("experts", "experts", "tensor", False),
]


def pairs(cell: Cell) -> Iterator[tuple[int, Any, int, Any]]:
    return ((a, cell[a], b, cell[b]) for a, b in combinations(range(len(cell)), 2))


def pairwise() -> list[Cell]:
    """Cells in which every two values of every two axes meet: each time the one with most pairs that are missing."""
    every: list[Cell] = [*product(*AXES)]  # type: ignore[list-item]
    missing = {pair for cell in every for pair in pairs(cell)} - {pair for cell in CHOSEN for pair in pairs(cell)}
    found = list(CHOSEN)
    while missing:
        found.append(max(every, key=lambda cell: len(missing.intersection(pairs(cell)))))
        missing.difference_update(pairs(found[-1]))
    return found


def settings(cell: Cell) -> dict[str, Any]:
    strategy, model, rollout, lora = cell
    dtype = "float32" if strategy.startswith("zero") else "float64"
    return {"model": model, "dtype": dtype, "lora": lora, "train": STRATEGIES[strategy], **ROLLOUTS[rollout]}


def launch(size: int, folder: Path, cells: dict[str, dict[str, Any]]) -> dict[str, tuple[str | None, float]]:
    """Why each of some cells was refused, and its seconds, by name."""
    arguments = (SCRIPT, folder, json.dumps(cells))
    done = ranks.alone(*arguments, check=False) if size == 1 else ranks.job(size, *arguments, check=False)
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    ended = {line["cell"]: (line["refused"], line["seconds"]) for line in lines}
    assert ended.keys() == cells.keys(), done.stderr[-4000:]
    return ended


def make_models(folder: Path, names: set[str]) -> None:
    for name in names:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float64)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.1)
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)


def farthest(a: Any, b: Any) -> float:
    """Between numbers and tensors of two structures, which are equal otherwise; infinite if they are not."""
    if isinstance(a, dict):
        return max(farthest(a[key], b[key]) for key in a) if a.keys() == b.keys() else math.inf
    if isinstance(a, list):
        return max(map(farthest, a, b), default=0.0) if len(a) == len(b) else math.inf
    if isinstance(a, str):
        return 0.0 if a == b else math.inf
    return float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max())


def outcome(folder: Path) -> dict[str, Any]:
    run, loaded = (json.loads((folder / name).read_text()) for name in ("run.json", "loaded.json"))
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float64)
    return {
        **{key: run[key] for key in ("samples", "metrics", "after")},
        "loaded": loaded,
        "weights": torch.load(folder / "weights.pt"),
        "export": {name: weight.detach() for name, weight in model.state_dict().items()},
    }


class Ended(NamedTuple):
    """A cell that works, or is refused before anything starts: its worst difference from one process, or the reason."""

    refused: str | None
    worst: float
    seconds: float


def walk(size: int, cells: list[Cell], folder: Path) -> dict[Cell, Ended]:
    """Run cells on `size` ranks, and compare each that works with one process."""
    make_models(folder, {model for _, model, _, _ in cells})
    named = {str(number): settings(cell) for number, cell in enumerate(cells)}
    ended = launch(size, folder, named)
    work = [s for name, s in named.items() if ended[name][0] is None]
    plain = {f"{s['model']} {s['dtype']} {s['lora']}": {k: s[k] for k in ("model", "dtype", "lora")} for s in work}
    assert not plain or {reason for reason, _ in launch(1, folder, plain).values()} == {None}
    loads = {f"load {name}": {**plain_of, "loads": name} for name, plain_of in plain.items()}
    loads |= {f"load {name}": {**named[name], "loads": name} for name, (reason, _) in ended.items() if reason is None}
    assert not loads or {reason for reason, _ in launch(1, folder, loads).values()} == {None}
    walked = {}
    for number, cell in enumerate(cells):
        reason, seconds = ended[str(number)]
        if reason is not None:
            assert not reason.startswith("!!"), (cell, reason)
            walked[cell] = Ended(reason, 0.0, seconds)
            continue
        s = named[str(number)]
        one, many = (outcome(folder / name) for name in (f"{s['model']} {s['dtype']} {s['lora']}", str(number)))
        limit = 1e-9 if s["dtype"] == "float64" else 1e-4  # ZeRO trains fp32, whose sums ranks round otherwise
        off = {name: farthest(one[name], many[name]) for name in one}
        assert max(off.values()) < limit, (cell, off)
        walked[cell] = Ended(None, max(off.values()), seconds)
    return walked


@pytest.mark.slow
@pytest.mark.parametrize("cells", ["megatron", "zero"])
def test_a_cell_is_one_process_or_refused(tmp_path: Path, cells: str) -> None:
    for cell, ended in walk(2, OF_TWO[cells], tmp_path).items():
        is_refused = cell == ("zero 3", "tied", "same", True)
        assert ("ZeRO of stage 3" in str(ended.refused)) if is_refused else ended.refused is None


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_two_values_of_two_axes_meet_in_a_cell_that_works_or_is_refused(tmp_path: Path, part: int) -> None:
    for cell, ended in walk(4, pairwise()[part::PARTS], tmp_path).items():
        found = ended.refused or f"works | {ended.worst:.1e} | {ended.seconds:.1f}"
        print(" | ".join(map(str, cell)), "|", found, flush=True)
