"""What `dtype: auto` means is settled when a run begins, and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import settings
from verl.config.load import build_config
from verl.errors import ConfigError
from verl.models import loading
from verl.run.resolved import FILE, resolve


def dtypes(config: Any) -> tuple[str, str]:
    return config.actor_rollout_ref.model.dtype, config.critic.model.dtype


def test_a_run_goes_on_in_the_dtype_in_which_it_began(
    tmp_path: Path, make_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(settings(tmp_path, make_tiny("llama", torch.bfloat16)))
    assert dtypes(config) == ("auto", "auto")
    for began_slow, dtype in ((True, "float32"), (False, "bfloat16")):
        directory = tmp_path / dtype
        directory.mkdir()
        for slow in (began_slow, not began_slow):  # the second time on another machine
            monkeypatch.setattr(loading, "slow_in_half_precision", lambda slow=slow: slow)
            assert dtypes(resolve(config, directory)) == (dtype, dtype)


def test_a_dtype_that_the_settings_name_stays(tmp_path: Path, make_tiny: Callable[..., Path]) -> None:
    changes = {"actor_rollout_ref.model.dtype": "float16"}
    config = build_config(settings(tmp_path, make_tiny("llama", torch.float32), **changes))
    assert dtypes(resolve(config, tmp_path)) == ("float16", "float32")


@pytest.mark.parametrize("text", ["", "[]", '{"dtypes": {"actor_rollout_ref": "int8"}}'])
def test_a_damaged_record_is_named(tmp_path: Path, make_tiny: Callable[..., Path], text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=FILE):
        resolve(build_config(settings(tmp_path, make_tiny())), tmp_path)
