import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forked
from tests.properties import examples
from verl._base.visible import visible
from verl._host.log import setup_logging

EVIL = "\x1b]0;title\x07\x1b[2J\r2026-01-01 00:00:00 INFO verl: ok\n2026-01-01 00:00:00 INFO verl: forged\x9b31m\u202e"


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b\r\n\b\x9b\u2028\u202e")))
@examples(200)
def test_nothing_acts_on_a_terminal_and_no_line_is_another(text: str) -> None:
    shown = visible(f"first {text}", "    ")
    assert all(c.isprintable() or c in "\n\t" or ord(c) > 0x2069 or 0xA0 <= ord(c) < 0x200E for c in shown)
    assert all(not line or line.startswith("    ") for line in shown.split("\n")[1:])


def test_plain_text_is_as_it_was() -> None:
    for text in ("", "a\tb", "größer als 3 · 日本語 👩‍👩‍👧", "a\n\nb"):
        assert visible(text, "") == text


def test_logs_have_a_line_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path / "log")
    try:
        logger = logging.getLogger("verl.test")
        logger.warning("the server says: %s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logger.exception("it failed")
    finally:
        for handler in [h for h in logging.getLogger("verl").handlers if getattr(h, "of_verl", False)]:
            logging.getLogger("verl").removeHandler(handler)
            handler.close()
        logging.getLogger("verl").propagate = True
    for text in (capfd.readouterr().err, (tmp_path / "log").read_text()):
        assert not set(text) & set("\x1b\r\x07\x9b\u202e")
        begun = [line for line in text.splitlines() if line and not line.startswith("    ")]
        assert len(begun) == 2 and "forged" not in begun[0] and "it failed" in begun[1]
        assert r"\x1b[2J" in text and "    2026-01-01 00:00:00 INFO verl: forged" in text


def test_errors_of_commands_have_no_escapes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text('"tr\\e[2Jainer": 1\n')
    done = forked.run([sys.executable, "-m", "verl", "train", str(file)], stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert r"\x1b[2J" in done.stderr and "\x1b[2J" not in done.stderr
