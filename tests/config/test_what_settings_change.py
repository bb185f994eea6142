"""Every setting states at its definition what it changes, and does."""

from __future__ import annotations

import functools
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from tests.config.observed import Observer, Seen, distance, observe, with_changes
from tests.config.shown import BASE, SHOWN, make_world
from tests.conftest import Plain
from verl.config import build_config
from verl.config.schema import Config
from verl.data.tasks import TaskSource
from verl.errors import ConfigError
from verl.record import Change, Record, extra, section
from verl.rollout.base import SamplingParams
from verl.rollout.options import SamplerOptions
from verl.training.options import EngineOptions


def paths(record: type[Record], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below a record with its field, also of records in lists and mappings (`*`)."""
    for name, field in record.model_fields.items():
        if section(field.annotation) is None:
            yield prefix + name, field
        for inner, path in below(field.annotation, prefix + name):
            yield from paths(inner, f"{path}.")


def below(annotation: Any, path: str) -> Iterator[tuple[type[Record], str]]:
    record = section(annotation)
    if record is not None:
        yield record, path  # type: ignore[misc]
    many = typing.get_origin(annotation) in (tuple, dict)
    for part in typing.get_args(annotation) if record is None else ():
        yield from below(part, f"{path}.*" if many else path)


SETTINGS = {**dict(paths(Config)), **dict(paths(TaskSource, "data.train."))}
LATER = {path: extra(field, "later") for path, field in SETTINGS.items() if extra(field, "later")}


def test_every_setting_states_what_it_changes_and_has_an_input_that_shows_it() -> None:
    kinds = typing.get_args(Change)
    assert [path for path, field in SETTINGS.items() if extra(field, "changes") not in kinds] == []
    assert sorted(SETTINGS) == sorted({*SHOWN, *LATER})


@pytest.mark.parametrize("record", [EngineOptions, SamplerOptions, SamplingParams])
def test_what_only_python_can_set_states_what_it_changes_too(record: Any) -> None:
    if is_dataclass(record):
        stated = {field.name: field.metadata.get("changes") for field in fields(record)}
    else:
        stated = {name: extra(field, "changes") for name, field in record.model_fields.items()
                  if section(field.annotation) is None}  # fmt: skip
    assert [name for name, changes in stated.items() if changes not in typing.get_args(Change)] == []


@pytest.mark.parametrize("path", LATER)
def test_a_setting_of_later_has_one_value(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}: {LATER[path]}"):
        build_config(with_changes({}, {**BASE, path: 1}))


@pytest.fixture(scope="module")
def see(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Observer, Mapping[str, Any]], Seen]]:
    """What an observer sees of settings, once for each."""
    world = tmp_path_factory.mktemp("world")
    make_world(world)
    servers = [Plain(number) for number in (1, 2)]
    numbers = itertools.count()

    @functools.cache
    def seen(observer: Observer, settings: str) -> Seen:
        for number, server in enumerate(servers, start=1):
            settings = settings.replace(f"SERVER{number}", server.url)
        return observe(observer, json.loads(settings), world / f"run-{next(numbers)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(world)
        yield lambda observer, settings: seen(observer, json.dumps(settings, sort_keys=True))
    for server in servers:
        server.kill()


def cases() -> Iterator[Any]:
    for path, case in SHOWN.items():
        marks = [pytest.mark.slow] if case.slow else []
        if path.rsplit(".", 1)[-1] in ("process", "workers", "max_workers"):
            marks.append(pytest.mark.reward_processes)
        yield pytest.param(path, id=path, marks=marks)


@pytest.mark.parametrize("path", [*cases()])
def test_two_values_differ_in_what_the_setting_changes(see: Callable[..., Seen], path: str) -> None:
    case = SHOWN[path]
    one, other = (
        see(case.observer, with_changes({}, {**BASE, **case.beside, **case.needs, **along, path: value}))
        for value, along in ((case.one, {}), (case.other, case.along))
    )
    changes = extra(SETTINGS[path], "changes")
    if changes == "limit":
        assert one.ended != other.ended
        return
    for seen in (one, other):
        assert not isinstance(seen.ended, str), seen.ended
    if changes == "result":
        assert distance(one.numbers, other.numbers) > 1e-9
        return
    assert distance(one.numbers, other.numbers) <= case.within
    if changes == "output":
        assert distance(one.files, other.files)
    else:
        counts = [sum(n for name, n in seen.calls.items() if case.count in name) for seen in (one, other)]
        assert counts[0] != counts[1]


@pytest.mark.parametrize("path", [path for path, case in SHOWN.items() if case.needs])
def test_a_setting_that_needs_another_is_refused_without_it(see: Callable[..., Seen], path: str) -> None:
    case = SHOWN[path]
    usual = SETTINGS[path].default
    (value, *_) = [
        v
        for v in (case.one, case.other)
        if v not in (None, [], {}) and (tuple(v) if isinstance(v, list) else v) != usual
    ]
    seen = see(case.observer, with_changes({}, {**BASE, **case.beside, path: value}))
    section, *_, name = path.split(".")
    # Of several settings of a section that nothing reads the first is named.
    named = [name, f"the section '{section}'", *(["critic."] if section == "critic" else [])]
    assert isinstance(seen.ended, str) and any(words in seen.ended for words in named)
