"""Mixtures of data sets have TRL's rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trl.test_peer_numbers import PEER, ROOT
from verl.errors import ConfigError
from verl.trl.scripts import DatasetMixtureConfig, get_dataset

#: In TRL's environment, which has what our module needs, and not what the rest of the package does.
BESIDE_TRL = """
import importlib.util, json, sys
from pathlib import Path
from trl.scripts import utils as theirs

folder = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("ours", sys.argv[2])
ours = sys.modules["ours"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)
for name, count in (("a", 9), ("b", 4)):
    lines = [json.dumps({"prompt": f"{name}{n}", "other": n}) + "\\n" for n in range(count)]
    (folder / f"{name}.jsonl").write_text("".join(lines))

def rows(module, fractions, **more):
    parts = [
        module.DatasetConfig(path="json", data_files=str(folder / f"{name}.jsonl"), columns=["prompt"], fraction=share)
        for name, share in zip("ab", fractions)
    ]
    return module.get_dataset(module.DatasetMixtureConfig(datasets=parts, **more))

for fractions in ((None, None), (0.5, 0.5), (0.75, 0.25), (0.0, 1.0)):
    wanted, mine = (list(rows(module, fractions)["train"]["prompt"]) for module in (theirs, ours))
    assert mine == wanted and mine, (fractions, mine, wanted)
sizes = [
    {name: len(part) for name, part in rows(module, (None, None), test_split_size=0.25).items()}
    for module in (theirs, ours)
]
assert sizes[0] == sizes[1] and len(sizes[0]) == 2, sizes
for fractions in ((0.5, None), (-0.5, 0.5), (0.0, 0.0)):
    try:
        rows(ours, fractions)
    except ours.ConfigError as error:
        assert "`fraction`" in str(error)
    else:
        raise AssertionError(fractions)
"""


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"get_dataset needs datasets, .*pip install datasets"):
        get_dataset(DatasetMixtureConfig([{"path": "json"}]))  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl")
def test_rows_are_those_of_trl(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [PEER, "-c", BESIDE_TRL, tmp_path, ROOT / "verl" / "trl" / "scripts.py"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
