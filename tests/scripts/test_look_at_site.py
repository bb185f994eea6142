"""What `scripts/look_at_site.py` finds on pages with each fault, and that it finds none on a good one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.look_at_site import main
from tests.browser import PROGRAM

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian: apt-get install chromium)")
PAGE = "<!doctype html><meta name=viewport content='width=device-width'><body><article>{}</article>"
LINKS = "<a href='#here'>here</a> <a href='https://example.org/x'>elsewhere</a>"
GOOD = f"<p id=here>text {LINKS}</p><pre style='overflow-x: auto'>{'x' * 300}</pre>"
FAULTS = {
    "beyond the right edge": "<div style='width: 3000px'>wide</div>",
    "scrolls sideways": "",
    "text too small": "<p style='font-size: 11px'>small</p>",
    "code cut off": f"<pre style='overflow: hidden'>{'x' * 300}</pre>",
    "no such picture": "<img src=none.png>",
    "a link leads nowhere": "<a href=none/>none</a>",
    "#nowhere": "<a href=#nowhere>nowhere</a>",
}


def look(site: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["look_at_site.py", "--site", str(site)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_each_fault_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(GOOD))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "index.html").write_text(PAGE.format("".join(FAULTS.values())))
    assert look(tmp_path, monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert all(line.startswith("bad") for line in lines), lines
    assert all(any(fault in line for line in lines) for fault in FAULTS), lines
    (tmp_path / "bad" / "index.html").write_text(PAGE.format(GOOD))
    assert look(tmp_path, monkeypatch) == 0
