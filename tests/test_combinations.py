"""The table of what does not go together: each entry is refused by the driver, by name, before anything is started."""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests import forked, ranks
from tests.roles.test_cells import MODELS, ROLLOUTS, STRATEGIES
from verl._base.combinations import NOT_TOGETHER, check, conflicts
from verl.errors import ConfigError

SCRIPT = Path(__file__).parent / "roles" / "rank_refused.py"
TRAIN: dict[str, Any] = {"strategy": "ddp"}
ZERO_3 = {"train": {"strategy": "deepspeed", "deepspeed_config": {"zero_stage": 3}}, "dtype": "float32"}
MEGATRON = {"train": {"strategy": "megatron", "tensor_parallel_size": 2}}
#: How each name of the table is asked for.
ASKS: dict[str, dict[str, Any]] = {
    **{name: {"train": {"strategy": name}} for name in ("single", "ddp", "fsdp", "deepspeed", "megatron")},
    "several ranks": {},
    "pp": {"train": {"pipeline_parallel_size": 2}},
    "sp": {"train": {"ulysses_sequence_parallel_size": 2}},
    "ep": {"train": {"expert_parallel_size": 2}, "model": "experts"},
    "tp": {"train": {"tensor_parallel_size": 2}},
    "use_torch_compile": {"train": {"use_torch_compile": True}},
    "padded rows": {"use_remove_padding": False},
    "padding": {"use_remove_padding": False},
    "fsdp_config": {"train": {"fsdp_config": {"fsdp_size": 2}}},
    "deepspeed_config": {"train": {"deepspeed_config": {"zero_stage": 3}}},
    "gathered weights": {"train": {"strategy": "fsdp", "fsdp_config": {"param_offload": True}}},
    "one data-parallel rank": {"train": {"tensor_parallel_size": 4}},
    "ZeRO": {"train": {"strategy": "deepspeed"}, "dtype": "float32"},
    "ZeRO 3": ZERO_3,
    "Megatron": MEGATRON,
    "shard": {"train": {"strategy": "fsdp"}},
    "parts": {"train": {"strategy": "fsdp"}},
    "optimizer": {"optim": "made"},
    "live optimizer": {"optim": "live"},
    "moments in bfloat16": {"optim": {"moments": "bfloat16"}},
    "decay of matrices": {"optim": {"weight_decay": 0.1, "weight_decay_on": "matrices"}},
    "use_amp": {"train": {"use_amp": True}},
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "adapters": {"lora": {"r": 2}},
    "adapted experts": {"lora": {"r": 2}, "model": "experts"},
    "other ranks": {"placement": {"actor": "cpu:0-1", "rollout": "cpu:2-3"}},
    "not Megatron": {"model": "gpt2"},
    "frozen weights": {"freezes": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "no recomputation": {"no_checkpointing": True},
    "training": {},
    "nothing to train": {"freezes_all": True},
    "no end": {"optim": {"schedule": "linear"}},
    "tensor_model_parallel_size": {"tensor_parallel_size": 2},
    "batch_invariant": {"batch_invariant": True},
    "overlap_comm": {"overlap_comm": True},
    "hf": {"rollout": "hf"},
    "vllm": {"rollout": "vllm"},
    "other engine": {"rollout": f"{SCRIPT}:outcome"},
    "no paged forward": {"model": "bloom"},
    "responses": {},
    "score": {"head": "score"},
}
#: What no settings can ask for together, on ranks that torchrun started; the table is asked itself.
DIRECT = {
    ("megatron", "shard"),  # only 'fsdp' has shards
    ("Ray", "live optimizer"),
    ("ZeRO", "several dtypes"),  # a value model in bf16, see test_deepspeed.py
    ("training", "other dtype"),
    ("vllm", "int4"),
    ("responses", "value"),  # an actor has no such head
    ("tensor_model_parallel_size", "no paged forward"),
    ("overlap_comm", "accelerator"),  # see test_auto.py
}
PAIRS = [(one, other, why) for one, others, why in NOT_TOGETHER for other in others]


def merged(*asks: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": "groups", "dtype": "float64"}
    for ask in asks:
        for name, value in ask.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged_settings(found[name], value) if both else value
    return found


def merged_settings(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **other}


def refusals(cases: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    done = forked.run([sys.executable, SCRIPT, json.dumps(cases)], env={**ranks.ENV, **env}, timeout=280)
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    refused = {line["case"]: line["refused"] for line in lines}
    assert refused.keys() == cases.keys(), done.stderr[-4000:]
    return refused


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a pair of each entry", "all pairs"]
)
def test_what_does_not_go_together_is_refused_by_the_driver_before_a_start(whole: bool) -> None:
    firsts = [(one, others[0], why) for one, others, why in NOT_TOGETHER]
    pairs = [pair for pair in (PAIRS if whole else firsts) if pair[:2] not in DIRECT]
    refused = refusals({f"{one} x {other}": merged(ASKS[one], ASKS[other]) for one, other, _ in pairs})
    wrong = {}
    for one, other, why in pairs:
        said = refused[f"{one} x {other}"] or ""
        if not re.search(
            ".+".join(map(re.escape, re.split(r"\{[01]\}", why.replace("{{", "{").replace("}}", "}")))), said
        ):
            wrong[one, other] = said
    assert not wrong


@pytest.mark.parametrize(("one", "other"), sorted(DIRECT))
def test_what_settings_cannot_ask_for_is_refused_too(one: str, other: str) -> None:
    check({one: one})
    check({other: other})
    with pytest.raises(ConfigError):
        check({one: one, other: other})


def test_what_goes_together_is_not_refused() -> None:
    assert not [*conflicts({name: name for name in ("fsdp", "tp", "adapters", "use_amp", "float32", "training")})]
    assert refusals({name: merged(ask) for name, ask in ASKS.items() if name in ("fsdp", "tp", "pp", "ep", "Megatron")})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_combination_is_decided_by_the_driver(strategy: str) -> None:
    """Of a strategy with models, types of weights, ways to generate and adapters: refused with a reason, or accepted;
    each strategy is accepted with something, and each way to generate with data parallelism."""
    cells = [*product(MODELS, ROLLOUTS, (False, True), ("float32", "float64", "bfloat16"))]
    cases = {
        json.dumps(cell): merged(
            {"train": STRATEGIES[strategy], "model": cell[0], "dtype": cell[3]},
            {**ROLLOUTS[cell[1]].get("rollout", {}), "placement": ROLLOUTS[cell[1]].get("placement")},
            {"lora": {"r": 2}} if cell[2] else {},
        )
        for cell in cells
    }
    refused = refusals(cases)
    accepted = {json.loads(name)[1] for name, reason in refused.items() if reason is None}
    assert accepted == {*ROLLOUTS} if strategy == "ddp" else accepted
    assert all(reason is None or len(reason) > 20 for reason in refused.values())
