"""Every setting states at its definition what it changes, and does."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from tests.config.observed import Observer, Seen, checked, distance, observe, with_changes
from tests.config.shown import BASE, SHOWN, Shown
from tests.config.world import make_world
from tests.conftest import Plain
from tests.package import modules
from verl._base.record import Change, Record, extra, section
from verl.config import build_config
from verl.config.schema import Config
from verl.data.tasks import TaskSource
from verl.errors import ConfigError
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


#: Records that only Python makes: what they add to those of files, or have otherwise.
RECORDS: dict[str, Any] = {record.__name__: record for record in (EngineOptions, SamplerOptions, SamplingParams)}
IN_FILES = {**dict(paths(Config)), **dict(paths(TaskSource, "data.train."))}
IN_PYTHON = {
    f"{name}.{field}": (getattr(record, "model_fields", None) or record.__dataclass_fields__)[field]
    for name, record in RECORDS.items()
    for field in inspect.get_annotations(record)
}
SETTINGS = IN_FILES | IN_PYTHON
LATER = {path: extra(field, "later") for path, field in IN_FILES.items() if extra(field, "later")}


def stated(field: Any) -> Change | None:
    """What a setting states at its definition that it changes; all of `SamplingParams` change what is sampled."""
    return extra(field, "changes") if isinstance(field, FieldInfo) else "result"


def test_every_setting_states_what_it_changes_and_has_two_values_that_show_it() -> None:
    kinds = typing.get_args(Change)
    assert [path for path, field in SETTINGS.items() if stated(field) not in kinds] == []
    assert sorted(SETTINGS) == sorted({*SHOWN, *LATER})


@pytest.mark.parametrize("path", LATER)
def test_a_setting_of_later_has_one_value(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}: {LATER[path]}"):
        build_config(with_changes({}, {**BASE, path: 1}))


See = Callable[[Observer, Mapping[str, Any], int], Seen]


@pytest.fixture(scope="module")
def see(tmp_path_factory: pytest.TempPathFactory) -> Iterator[See]:
    """What an observer sees of settings and the input of a number, once for each."""
    world = tmp_path_factory.mktemp("world")
    make_world(world)
    servers = [Plain(number) for number in (1, 2)]
    folders = (world / f"run-{count}" for count in itertools.count())

    @functools.cache
    def of_file(observer: Observer, settings: str, number: int) -> Seen:
        for count, server in enumerate(servers, start=1):
            settings = settings.replace(f"SERVER{count}", server.url)
        return observe(observer, lambda: checked(json.loads(settings)), number, next(folders))

    def seen(observer: Observer, settings: Mapping[str, Any], number: int) -> Seen:
        (section, *_) = settings
        if section in RECORDS:
            return observe(observer, lambda: RECORDS[section](**settings[section]), number, next(folders))
        return of_file(observer, json.dumps(settings, sort_keys=True), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(world)
        yield seen
    for server in servers:
        server.kill()


def cases() -> Iterator[Any]:
    for path, case in SHOWN.items():
        marks = [pytest.mark.slow] if case.slow else []
        if path.rsplit(".", 1)[-1] in ("process", "workers", "max_workers"):
            marks.append(pytest.mark.reward_processes)
        yield pytest.param(path, id=path, marks=marks)


def settings_of(path: str, case: Shown, *more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings; those of a record of Python's have no others beside them."""
    base = {} if path in IN_PYTHON else BASE
    changes: dict[str, Any] = {}
    for part in (base, case.beside, *more):
        changes |= part
    return with_changes({}, changes)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("path", [*cases()])
def test_two_values_differ_in_what_the_setting_changes(see: See, path: str) -> None:
    """Inputs are generated, one after the other, until the values differ: prompts, samples of a policy near the trained
    one or far from it, answers (`tests.config.inputs`). Those of whole runs and of data are files, one set made by hand
    (`make_world`): their rows are what such settings are about, and so are models and functions that settings name."""
    case, changes = SHOWN[path], stated(SETTINGS[path])
    for number in range(case.tries):
        one, other = (
            see(case.observer, settings_of(path, case, case.needs, along, {path: value}), number)
            for value, along in ((case.one, {}), (case.other, case.along))
        )
        if changes != "limit":
            for seen in (one, other):
                assert not isinstance(seen.ended, str), f"input {number}: {seen.ended}"
        if changes in ("cost", "output"):
            apart = distance(one.numbers, other.numbers)
            assert apart <= case.within, f"input {number}: {path} changes numbers by {apart}"
        if differ(changes, case, one, other):
            return
    pytest.fail(
        f"{path}: {case.one!r} and {case.other!r} have the same {changes} in all of {case.tries} inputs tried; "
        f"calls of {case.count!r}: {calls(case, one)}"
    )


def differ(changes: Change | None, case: Shown, one: Seen, other: Seen) -> bool:
    if changes == "result":
        return distance(one.numbers, other.numbers) > 1e-9
    if changes == "output":
        return distance(one.files, other.files) > 0
    if changes == "limit":
        return bool(one.ended != other.ended)
    return calls(case, one) != calls(case, other)


def calls(case: Shown, seen: Seen) -> int:
    return sum(count for name, count in seen.calls.items() if case.count in name)


def test_the_functions_that_are_counted_are_there() -> None:
    """Those of the package; one that is gone would be seen only by the slow test of its setting."""
    files = {place: text for place, (text, _) in modules().items()}
    for path, case in SHOWN.items():
        file, _, function = case.count.rpartition(":")
        texts = [text for place, text in files.items() if file and f"/{place}".endswith(f"/{file}")]
        assert not texts or re.search(rf"def {function}", "".join(texts)), f"{path}: {case.count}"


@pytest.mark.parametrize("path", [path for path, case in SHOWN.items() if case.needs])
def test_a_setting_that_needs_another_is_refused_without_it(see: See, path: str) -> None:
    case = SHOWN[path]
    usual = SETTINGS[path].default
    (value, *_) = [
        v
        for v in (case.one, case.other)
        if v not in (None, [], {}) and (tuple(v) if isinstance(v, list) else v) != usual
    ]
    seen = see(case.observer, settings_of(path, case, {path: value}), 0)
    section, *_, name = path.split(".")
    # Of several settings of a section that nothing reads the first is named.
    named = [name, f"the section '{section}'", *(["critic."] if section == "critic" else [])]
    assert isinstance(seen.ended, str) and any(words in seen.ended for words in named)
