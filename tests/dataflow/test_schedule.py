"""The scheduling of asynchronous training over random schedules: nothing is lost, trained twice, or too old."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.properties import examples
from verl.dataflow.schedule import Schedule
from verl.errors import ConfigError, DataError


class AnySchedule(RuleBasedStateMachine):
    """Rollouts finish in any order and may be lost, prompts come and steps are taken at any time, the run is cut off
    and goes on from its last checkpoint."""

    @initialize(groups=st.integers(1, 4), staleness=st.integers(0, 3))
    def start(self, groups: int, staleness: int) -> None:
        self.schedule: Schedule[tuple[str, int]] = Schedule(groups, staleness)
        self.accepted: list[str] = []
        self.trained: list[str] = []
        self.flying: dict[str, int] = {}
        self.steps = 0
        self.saved = self.snapshot()

    def snapshot(self):
        return (
            self.schedule.version,
            self.schedule.unfinished,
            {**self.schedule.ready},
            list(self.accepted),
            list(self.trained),
        )

    @precondition(lambda self: self.schedule.room > 0)
    @rule()
    def accept(self) -> None:
        self.accepted.append(f"g{len(self.accepted)}")
        self.schedule.accept(self.accepted[-1])

    @rule()
    def begin(self) -> None:
        group = self.schedule.begin()
        if group is not None:
            assert group not in self.flying
            self.flying[group] = self.steps

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data) -> None:
        group = data.draw(st.sampled_from(sorted(self.flying)))
        self.schedule.finish(group, (group, self.flying.pop(group)))
        with pytest.raises(DataError, match="trained twice"):
            self.schedule.finish(group, (group, 0))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def lose(self, data) -> None:
        group = data.draw(st.sampled_from(sorted(self.flying)))
        del self.flying[group]
        self.schedule.lose(group)

    @precondition(lambda self: self.schedule.due)
    @rule()
    def train(self) -> None:
        batch = self.schedule.take()
        assert len(batch) == self.schedule.groups
        for group, began in batch:
            assert 0 <= self.steps - began <= self.schedule.max_staleness
            assert group not in self.trained
            self.trained.append(group)
        self.steps += 1

    @rule(data=st.data())
    def advance(self, data) -> None:
        """A step as a driver takes it: all that may be begun is, and rollouts finish until the step is due."""
        while self.schedule.room > 0:
            self.accept()
        while len(self.flying) < len(self.schedule.unfinished):
            self.begin()
        while not self.schedule.due:
            self.finish(data)
        self.train()

    @rule()
    def save(self) -> None:
        self.saved = self.snapshot()

    @rule()
    def crash_and_resume(self) -> None:
        version, waiting, ready, self.accepted, self.trained = self.saved
        self.accepted, self.trained = list(self.accepted), list(self.trained)
        self.schedule = Schedule(self.schedule.groups, self.schedule.max_staleness)
        self.schedule.restore(version, waiting, ready)
        self.flying, self.steps = {}, version

    @rule()
    def everything_finishes(self) -> None:
        """No deadlock: when all that may begin has finished, a step is due or more may be accepted."""
        while (group := self.schedule.begin()) is not None:
            self.flying[group] = self.steps
        for group in list(self.flying):
            self.schedule.finish(group, (group, self.flying.pop(group)))
        assert self.schedule.due or self.schedule.room > 0

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if hasattr(self, "schedule"):
            places = [*self.trained, *self.schedule.ready, *self.schedule.unfinished]
            assert sorted(places) == sorted(self.accepted)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = examples(100, stateful_step_count=50)


def test_a_step_waits_for_a_rollout_that_would_grow_too_old() -> None:
    schedule: Schedule[str] = Schedule(groups=1, max_staleness=1)
    for name in ("slow", "fast"):
        schedule.accept(name)
    assert (schedule.begin(), schedule.begin(), schedule.begin(), schedule.room) == ("slow", "fast", None, 0)
    schedule.finish("fast", "fast")
    assert schedule.take() == ["fast"]  # the slow one is not waited for yet
    schedule.accept("next")
    schedule.begin()
    schedule.finish("next", "next")
    assert not schedule.due
    with pytest.raises(DataError, match="no step is due"):
        schedule.take()
    schedule.finish("slow", "slow")
    assert schedule.take() == ["slow"]
    assert schedule.take() == ["next"]


def test_slow_rollouts_are_waited_for_while_steps_for_all_of_them_are_left() -> None:
    schedule: Schedule[str] = Schedule(groups=1, max_staleness=2)

    def feed(name: str) -> None:
        schedule.accept(name)
        assert schedule.begin() == name

    for name in ("slow", "slower", "fast"):
        feed(name)
    schedule.finish("fast", "fast")
    assert schedule.take() == ["fast"]  # step 0; the others are due by step 2
    feed("next")
    schedule.finish("next", "next")
    assert not schedule.due  # step 1 would leave step 2 for two
    schedule.finish("slower", "slower")
    assert schedule.take() == ["slower"]
    assert not schedule.due
    schedule.finish("slow", "slow")
    assert [schedule.take(), schedule.take()] == [["slow"], ["next"]]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError):
        Schedule(0, 1)
    schedule: Schedule[None] = Schedule(1, 0)
    schedule.accept("a")
    with pytest.raises(DataError, match="too old"):
        schedule.accept("b")
    with pytest.raises(DataError, match="already"):
        schedule.accept("a")
    with pytest.raises(DataError, match="was not being sampled"):
        schedule.lose("a")


@pytest.mark.parametrize(
    ("groups", "max_staleness", "waiting", "ready", "fits"),
    [
        (2, 1, 2, [4, 4], True),
        (2, 1, 0, [4, 4], True),
        (4, 2, 2, [4, 4], True),
        (2, 1, 2, [3, 4], False),  # one should have been trained by the step before
        (2, 1, 0, [4, 4, 4], False),  # three for the next step
        (1, 1, 2, [4, 4], False),  # more than fit
        (2, 0, 0, [4, 4], False),
        (2, 0, 2, [], True),
        (2, 0, 4, [], False),
    ],
)
def test_what_was_begun_under_another_bound_is_trained_in_time_or_refused(
    groups: int, max_staleness: int, waiting: int, ready: list[int], fits: bool
) -> None:
    schedule: Schedule[str] = Schedule(groups, max_staleness)
    state = [f"w{i}" for i in range(waiting)], {f"r{i}": (began, f"r{i}") for i, began in enumerate(ready)}
    if not fits:
        with pytest.raises(ConfigError, match="cannot train in time"):
            schedule.restore(5, *state)
        return
    schedule.restore(5, *state)
    left = {name: began for name, (began, _) in state[1].items()} | dict.fromkeys(state[0], 5)
    for step in range(5, 9):
        while schedule.room >= groups:
            for name in (f"{step}.{schedule.room}.{i}" for i in range(groups)):
                schedule.accept(name)
                left[name] = step
        while (name := schedule.begin()) is not None:
            schedule.finish(name, name)
        assert all(step - left.pop(name) <= max_staleness for name in schedule.take())


@pytest.mark.parametrize("staleness", [-1, 1001, 10**6])
def test_staleness_has_an_end(staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness {staleness}, 0 to 1000"):
        Schedule(2, staleness)
