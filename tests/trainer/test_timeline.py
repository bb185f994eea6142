"""The trace of a step: everything that worked is in it, and what did nothing is seen."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.trainer.timeline_file import gaps, read_timeline
from verl.dataflow.loop import begin
from verl.report.timeline import Span, TraceFile, busy_shares

PAUSE = 0.6


def slow(texts: list[str]) -> list[float]:
    time.sleep(PAUSE)
    return [float(len(text)) for text in texts]


def test_an_injected_gap_is_seen_in_the_trace(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    records: list[dict[str, Any]] = []
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4, ignore_eos=True))
    trainer = verl.PPOTrainer(
        actor, reward_fn=slow, log_dir=False, timeline=file, on_log_hook=lambda _, record: records.append(record), n=2
    )
    trainer.step(["one"])  # the engine is made
    began = time.time()
    trainer.step(["one"])
    took = time.time() - began
    spans = [span for span in read_timeline(file) if span.start >= began]
    assert {(span.node, span.role) for span in spans} == {
        ("rollout", "actor"),
        ("reward", "reward"),
        ("reference", "reference"),
        ("critic_values", "critic"),
        ("prepare", "controller"),
        ("update_actor", "actor"),
        ("update_critic", "critic"),
    }
    idle = gaps(spans, "actor", at_least=PAUSE / 2)
    assert len(idle) == 1 and idle[0][1] >= PAUSE * 0.9  # the actor waits for the reward
    reward = next(span for span in spans if span.role == "reward")
    assert abs(reward.start - idle[0][0]) < PAUSE / 2 and reward.seconds >= PAUSE * 0.99
    busy = records[-1]
    assert busy["busy/reward"] >= PAUSE * 0.9 / took
    assert busy["busy/actor"] <= 1 - PAUSE * 0.9 / took


def test_work_between_two_steps_counts_in_the_next_one_but_for_evaluations(tiny: Path) -> None:
    """Asynchronous training scores groups as they come, also while a checkpoint is saved or a hook runs."""
    pauses = [0.0]

    def reward(texts: list[str]) -> list[float]:
        time.sleep(pauses[0])
        return [float(len(text)) for text in texts]

    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4, ignore_eos=True))
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", log_dir=False, n=2)
    samples = trainer.actor.generate_sequences(["one"], n=2)
    before = trainer.step(["one"])
    pauses[0] = PAUSE
    begin(trainer.task.score(samples)).result(timeout=30)  # as AsyncTrainer begins it
    pauses[0] = 0.0
    after = trainer.step(["one"])
    pauses[0] = PAUSE
    trainer.evaluate(["one"])
    pauses[0] = 0.0
    evaluated = trainer.step(["one"])
    assert after["busy/reward"] >= min(1.0, 0.9 * PAUSE / after["time/step"])
    assert max(before["busy/reward"], evaluated["busy/reward"]) < 0.5


def test_a_trace_is_chrome_trace_json(tmp_path: Path) -> None:
    timeline = TraceFile(tmp_path / "timeline.json")
    timeline.add([Span("rollout", "actor", 10.0, 0.5, rank=1, host="a")], step=3)
    TraceFile(timeline.path).add([Span("reward", "reward", 11.0, 0.25, host="b")], step=4)  # the next attempt
    events = json.loads(timeline.path.read_text().rstrip().rstrip(",") + "]")
    assert {"name": "rollout", "ph": "X", "ts": 10_000_000, "dur": 500_000, "pid": 1}.items() <= events[2].items()
    assert events[0]["args"]["name"] == "rank 1 on a"
    assert [(s.node, s.rank, s.host, s.seconds) for s in read_timeline(timeline.path)] == [
        ("rollout", 1, "a", 0.5),
        ("reward", 0, "b", 0.25),
    ]
    with timeline.path.open("a") as file:
        file.write('{"name": "torn')
    assert len(read_timeline(timeline.path)) == 2


def test_a_trace_that_was_cut_off_goes_on_whole(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    TraceFile(file).add([Span("rollout", "actor", 1.0, 1.0), Span("reward", "reward", 2.0, 1.0)], step=1)
    whole = file.read_bytes()
    for cut, left in ((0, []), (1, []), (len(whole) - 40, ["rollout"]), (len(whole), ["rollout", "reward"])):
        file.write_bytes(whole[:cut])
        TraceFile(file).add([Span("update", "actor", 3.0, 1.0)], step=2)
        json.loads(file.read_text().rstrip().rstrip(",") + "]")
        assert [span.node for span in read_timeline(file)] == [*left, "update"]


def test_a_full_disk_delays_a_trace_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        timeline = TraceFile(tmp_path / "timeline.json")
        for step in (1, 2):
            timeline.add([Span("rollout", "actor", float(step), 1.0)], step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sum(r.getMessage().startswith(f"{timeline.path} takes no lines") for r in caplog.records) == 1
    assert timeline.path.read_text() == "[\n"
    timeline.add([Span("rollout", "actor", 3.0, 1.0)], step=3)
    assert [span.start for span in read_timeline(timeline.path)] == [1.0, 2.0, 3.0]


def test_shares_are_of_the_union_and_the_mean_of_ranks() -> None:
    spans = [Span("a", "actor", 0, 2), Span("b", "actor", 1, 2), Span("a", "actor", 0, 1, rank=1)]
    assert busy_shares(spans, 4.0) == {"busy/actor": pytest.approx((3 / 4 + 1 / 4) / 2)}
