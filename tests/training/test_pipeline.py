"""Pipeline parallelism: how models are cut into stages, and what stages keep and agree on.

That a pipeline learns what one process learns is a case of tests/training/test_layouts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import job
from tests.training.cases import tiny_model
from verl.errors import ConfigError
from verl.models.packed import PackedModel
from verl.training.parallel.pipeline import StageSplit
from verl.weights.shards import on_meta


def cut(model: Any, count: int) -> StageSplit:
    return StageSplit(model, PackedModel(model, device="cpu"), count)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "qwen3_moe", "falcon"])
def test_each_weight_is_on_one_stage_and_a_tied_embedding_on_both_ends(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    stages = [cut(model, 3).parameters(number) for number in range(3)]
    assert set.union(*stages) == set(model.parameters())
    assert sum(map(len, stages)) == len(list(model.parameters())) + tied
    assert model.get_input_embeddings().weight in stages[0]
    assert model.get_output_embeddings().weight in stages[2]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_without_weights_is_cut_as_one_with_them(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    empty = on_meta(lambda: type(model)(model.config))
    for number in range(3):
        stages = [cut(net, 3).parameters(number) for net in (model, empty)]
        names = [
            {name for name, p in net.named_parameters() if p in s}
            for net, s in zip((model, empty), stages, strict=True)
        ]
        assert names[0] == names[1]


def test_a_model_whose_layers_do_not_just_follow_one_another_is_refused_by_name() -> None:
    model = tiny_model(layers=4)
    norm = model.model.norm
    model.model.layers[1].register_forward_hook(lambda _, __, hidden: norm(hidden))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be cut into pp=2 stages: its layers do not"):
        cut(model, 2)


def test_a_model_whose_stages_compute_something_else_is_refused_by_name() -> None:
    model = tiny_model(layers=4)
    first, last = model.model.layers[0], model.model.layers[3]
    inputs: list[Any] = []
    model.model.register_forward_pre_hook(lambda *_: inputs.clear())
    first.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    last.register_forward_hook(lambda _, __, hidden: hidden + sum(inputs))  # reaches back over the other layers
    with pytest.raises(ConfigError, match=r"pp=2 stages: its stages compute something else than the whole"):
        cut(model, 2)


def test_stages_keep_few_micro_batches_agree_on_a_step_and_do_not_wait_forever() -> None:
    done = job(4, Path(__file__).with_name("rank_pipeline.py"))
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["alive"] == [4, 3, 2, 1]
    assert all("the loss does not depend on what the model predicts" in text for text in found["refused"])
    assert found["skipped"] == [[1.0, 2048.0]] * 4
    assert max(found["one_row"]) < 1e-10
    # One rank's deadline ends the wait of all.
    assert all("gloo" in text for text in found["late"][:3]), found["late"]
    assert any("Timed out waiting 4000ms" in text for text in found["late"])
