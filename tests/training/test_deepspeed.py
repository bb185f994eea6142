"""DeepSpeed's ZeRO takes the steps of one process, and its checkpoints go on elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import job
from tests.training.cases import OPTIM, tiny_model
from tests.training.rank_zero import CASES
from verl.errors import ConfigError
from verl.models.heads import ValueModel
from verl.training.backends.deepspeed import DeepSpeedEngine
from verl.training.options import EngineOptions
from verl.weights.layout import Layout, Mesh
from verl.weights.shard import run_blocks

SCRIPT = Path(__file__).with_name("rank_zero.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "metrics", "weights", "resumed"),
    [
        ("fast", 1e-5, 1e-3, 1e-5),
        ("llama", 1e-5, 1e-3, 1e-5),
        ("gpt2", 1e-5, 1e-3, 1e-5),
        # Masters that were rounded otherwise are a rounding of 16 bits apart.
        ("bf16", 1e-3, 1e-2, 1e-3),
    ],
)
def test_zero_equals_one_process_and_resumes_elsewhere(
    cases: str, metrics: float, weights: float, resumed: float
) -> None:
    pytest.importorskip("deepspeed")
    done = job(2, SCRIPT, cases)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == [str(case) for case in CASES[cases]]
    for line, case in zip(lines, CASES[cases], strict=True):
        assert line["metrics"] < metrics * (1 + line["moved"]), line
        assert line["weights"] < weights and line["predicted"] < 10 * weights, line
        assert line["names"] and line["specs"] and line["base"] == 0.0, line
        assert line["skipped"] == 1.0 and line["changed"] == 0.0, line
        assert line["resumed"] < resumed * (1 + line["moved"]), line
        assert line["held"] == (pytest.approx(0.5, abs=0.01) if case.stage == 3 else 1.0), line
        assert line["state"] == pytest.approx(0.5, abs=0.02), line


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4, 3, 2), (2, 1, 3, 2)])
def test_blocks_of_a_run_are_its_elements_in_their_places(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
    flat = tensor.flatten()
    for start in range(len(flat)):
        for end in range(start, len(flat) + 1):
            found = torch.full_like(tensor, -1)
            for offset, block in run_blocks(shape, start, flat[start:end]):
                place = tuple(slice(at, at + size) for at, size in zip(offset, block.shape, strict=True))
                assert (found[place] == -1).all()
                found[place] = block
            assert found.flatten()[start:end].equal(flat[start:end])
            assert int((found != -1).sum()) == end - start


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (torch.float32, {"use_amp": True}, "leave use_amp out"),
        (torch.float32, {"optim": OPTIM.replace(moments="bfloat16")}, "keeps the optimizer's moments in float32"),
        (torch.float64, {}, "all float32 or all bfloat16, not float64"),
        ("value", {}, "not bfloat16 and float32: give model.dtype=float32"),
    ],
)
def test_what_zero_does_not_train_is_refused_by_name(model: Any, options: dict[str, Any], message: str) -> None:
    head = "value" if model == "value" else "lm"
    live: Any = tiny_model(dtype=torch.bfloat16 if model == "value" else model)
    live = ValueModel.from_model(live) if model == "value" else live
    with pytest.raises(ConfigError, match=message):
        DeepSpeedEngine(
            live,
            EngineOptions(**{"optim": OPTIM, "strategy": "deepspeed", **options}),
            head=head,  # type: ignore[arg-type]
            mesh=Mesh((0, 1), Layout(replicate=2)),
        )


def test_without_deepspeed_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-hybrid\[deepspeed\]'"):
        DeepSpeedEngine(
            tiny_model(dtype=torch.float32),
            EngineOptions(optim=OPTIM, strategy="deepspeed"),
            mesh=Mesh((0, 1), Layout(replicate=2)),
        )
