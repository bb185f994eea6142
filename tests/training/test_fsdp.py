"""The options of FSDP: none but those of precision changes a number, and each does what it says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.ranks import job
from tests.training.rank_fsdp import CASES
from verl.errors import ConfigError
from verl.training.options import EngineOptions, FSDPConfig, TrainOptions


@pytest.mark.slow
def test_options_of_fsdp_do_what_they_say_and_change_no_number() -> None:
    done = job(2, Path(__file__).with_name("rank_fsdp.py"))
    found = {line["case"]: line for line in map(json.loads, filter(lambda t: t[:1] == "{", done.stdout.splitlines()))}
    for case, (_, units) in CASES.items():
        assert found[case]["apart"] < 1e-10, found[case]
        assert found[case]["units"] == units, case
    assert found["default"]["held"] > 0 and found["offloaded optimizer"]["held"] == 0
    assert found["own optimizer"]["apart"] < 1e-10
    mixed = found["mixed precision"]
    assert 0 < mixed["loss"] < 0.15
    assert mixed["gathered"] == "torch.bfloat16" and mixed["held"] == ["torch.float32"]
    assert "did you mean 'LlamaDecoderLayer'" in found["misspelt"]["error"]


def test_a_policy_may_be_set_as_an_attribute() -> None:
    config = FSDPConfig(forward_prefetch=True)
    config.wrap_policy_fn = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    options = EngineOptions(**{name: getattr(TrainOptions(fsdp_config=config), name) for name in ("fsdp_config",)})
    assert options.fsdp_config.wrap_policy_fn is config.wrap_policy_fn and options.fsdp_config.forward_prefetch
    assert FSDPConfig().wrap_policy_fn is None and TrainOptions().fsdp_config.wrap_policy_fn is None
    with pytest.raises(ConfigError, match=r"FILE\.py:FUNCTION"):
        config.wrap_policy_fn = "layers"
    with pytest.raises(Exception, match="frozen"):
        config.forward_prefetch = False
    with pytest.raises(ConfigError, match="give one of them"):
        FSDPConfig(wrap_policy_fn=len, wrap_policy={"transformer_layer_cls_to_wrap": "Block"})
