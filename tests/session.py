"""Hooks of pytest for the order and the time of a session: slow tests are divided over commits."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Generator

import pytest

BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="run the tests in an order that this text (a commit) decides")
    parser.addoption("--seconds", type=float, default=math.inf, help="begin no test after so much time")
    parser.addoption("--device", help="where the tests marked `gpu` run (the accelerator of this machine)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every commit has an order of its own, so that no test is always beyond the end of the time."""
    if (commit := config.getoption("--shard")) is not None:
        items.sort(key=lambda item: hashlib.sha256(f"{commit} {item.nodeid}".encode()).digest())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is not None and time.monotonic() - BEGAN > item.config.getoption("--seconds"):
        left = len(item.session.items) - item.session.items.index(item) - 1
        item.session.shouldstop = f"the time is up: {left} of {len(item.session.items)} tests are left to other commits"
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that are left to other commits are no failure."""
    if str(session.shouldstop).startswith("the time is up") and not session.testsfailed:
        session.exitstatus = pytest.ExitCode.OK
