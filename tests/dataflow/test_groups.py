import asyncio
import logging
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl.batch import Batch
from verl.dataflow import loop
from verl.dataflow.calls import DEADLINE
from verl.dataflow.executor import Result
from verl.dataflow.graph import ANY, Graph, Node
from verl.dataflow.loop import run_sync
from verl.errors import ClusterError, DataError, RewardError, RolloutError, TrainingError
from verl.trainer.runner import Run
from verl.trainer.step import draw

PROMPTS = Batch.from_columns({"group": ["p0", "p1", "p2"], "answer": [10, 11, 12]})


def run_graph(graph: Graph, batch: Batch, *, deadline: float = DEADLINE) -> Result:
    """Run all nodes of a graph, from synchronous code."""
    run = Run(deadline=deadline)
    return run_sync(draw(graph, batch, run))


def ids(prompts: Batch) -> list[list[str]]:
    return [[f"{group}/{k}" for k in range(4)] for group in prompts["group"]]


def sample(id_: str) -> dict[str, Any]:
    number = int(id_[1]) * 10 + int(id_[-1])
    return {"id": id_, "group": id_.split("/")[0], "response_tokens": [number] * (number % 3)}


def rollout(order: list[str], pause: float = 0.0, size: int = 1) -> Node:
    """A source that finishes its samples in the given order."""

    def generate(prompts: Batch) -> Iterator[Batch]:
        for at in range(0, len(order), size):
            time.sleep(pause)
            yield Batch.from_rows([sample(id_) for id_ in order[at : at + size]])

    return Node(
        name="rollout",
        run=generate,
        kind="source",
        inputs=("group",),
        outputs=("id", "group", "response_tokens"),
        slot="cpu:0",
        samples=ids,
    )


def lengths(batch: Batch) -> Batch:
    return Batch.from_columns({"length": batch.lengths("response_tokens")})


LENGTHS = Node(name="lengths", run=lengths, inputs=("response_tokens",), outputs=("length",), slot="cpu:0")
ALL_IDS = [id_ for group in ids(PROMPTS) for id_ in group]


def shuffled(seed: int) -> list[str]:
    order = list(ALL_IDS)
    random.Random(seed).shuffle(order)
    return order


@pytest.mark.parametrize("seed", range(4))
def test_rows_come_out_in_the_order_of_ids_with_the_columns_of_their_prompts(seed: int) -> None:
    result = run_graph(Graph([rollout(shuffled(seed), size=1 + seed), LENGTHS], inputs=["answer"]), PROMPTS)
    assert result.batch["id"] == ALL_IDS
    assert result.batch["response_tokens"] == [sample(id_)["response_tokens"] for id_ in ALL_IDS]
    assert result.batch["length"] == [len(tokens) for tokens in result.batch["response_tokens"]]
    assert result.batch["answer"] == [10] * 4 + [11] * 4 + [12] * 4
    assert result.timings.keys() == {"rollout", "lengths"}


@pytest.mark.parametrize("seed", range(3))
def test_an_episode_has_as_many_rows_as_it_gives_and_they_stay_together(seed: int) -> None:
    def generate(prompts: Batch) -> Iterator[Batch]:
        for id_ in shuffled(seed):
            parts = 1 + int(id_[-1]) % 3
            rows = [{**sample(id_), "id": f"{id_}.{part}", "episode": id_, "part": part} for part in range(parts)]
            yield Batch.from_rows(rows)

    source = replace(rollout(ALL_IDS), run=generate, outputs=("id", "group", "response_tokens", "episode", "part"))
    result = run_graph(Graph([source, LENGTHS], inputs=["answer"]), PROMPTS)
    expected = [(id_, part) for id_ in ALL_IDS for part in range(1 + int(id_[-1]) % 3)]
    assert [*zip(result.batch["episode"], result.batch["part"], strict=True)] == expected
    assert result.batch["length"] == result.batch.lengths("response_tokens")
    assert result.batch["answer"] == [10 + int(id_[1]) for id_, _ in expected]
    twice = replace(
        source,
        run=lambda prompts: chain(
            generate(prompts), [Batch.from_rows([{**sample("p0/1"), "id": "x", "episode": "p0/1", "part": 0}])]
        ),
    )
    with pytest.raises(RolloutError, match="gave sample 'p0/1' twice"):
        run_graph(Graph([twice, LENGTHS], inputs=["answer"]), PROMPTS)


def test_rows_node_sees_the_same_cuts_however_samples_finish() -> None:
    seen: dict[int, list[list[str]]] = {}
    for seed in range(3):
        calls: list[list[str]] = []

        async def watch(batch: Batch, calls: list[list[str]] = calls) -> None:
            calls.append(batch["id"])

        node = Node(name="watch", run=watch, inputs=("response_tokens",), groups=2)
        run_graph(Graph([rollout(shuffled(seed)), node]), PROMPTS)
        seen[seed] = sorted(calls)
    assert seen[0] == seen[1] == seen[2] == [ALL_IDS[:8], ALL_IDS[8:]]


def test_finished_groups_are_scored_before_the_slow_ones_are_done() -> None:
    first = threading.Event()

    async def score(batch: Batch) -> Batch:
        first.set()
        return Batch.from_columns({"reward": [1.0] * len(batch)})

    def generate(prompts: Batch) -> Iterator[Batch]:
        yield Batch.from_rows([sample(id_) for id_ in ALL_IDS[4:8]])
        assert first.wait(5), "the reward waits for the whole rollout"
        yield Batch.from_rows([sample(id_) for id_ in ALL_IDS[:4] + ALL_IDS[8:]])

    source = Node(name="rollout", run=generate, kind="source", outputs=("id", "response_tokens"), samples=ids)
    reward = Node(name="reward", run=score, inputs=("response_tokens",), outputs=("reward",))
    assert run_graph(Graph([source, reward]), PROMPTS).batch["reward"] == [1.0] * 12


def test_async_source_and_rows_that_are_samples_already() -> None:
    rows = Batch.from_columns({"id": ALL_IDS, "group": [id_[:2] for id_ in ALL_IDS], "answer": list(range(12))})

    async def generate(prompts: Batch) -> AsyncIterator[Batch]:
        for id_ in shuffled(1):
            await asyncio.sleep(0)
            yield Batch.from_rows([sample(id_)])

    source = Node(name="rollout", run=generate, kind="source", inputs=(ANY,), outputs=("id", "response_tokens"))
    result = run_graph(Graph([source, LENGTHS]), rows)
    assert result.batch["id"] == ALL_IDS
    assert result.batch["answer"] == list(range(12))


def test_waiting_overlaps_and_compute_does_not() -> None:
    running = 0
    most = 0
    called: list[str] = []

    def compute(batch: Batch) -> None:
        nonlocal running, most
        called.append("compute")
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1

    async def wait(batch: Batch) -> None:
        called.append("wait")
        await asyncio.sleep(0.2)

    nodes = [Node(name=f"wait{i}", run=wait, inputs=("group",)) for i in range(3)]
    nodes += [Node(name=f"compute{i}", run=compute, inputs=("group",), slot=f"cpu:{i}") for i in range(3)]
    began = time.perf_counter()
    result = run_graph(Graph(nodes), PROMPTS)
    assert time.perf_counter() - began < 1.0  # one after another: 3 x 3 x (0.2 + 0.05) = 2.25
    assert most == 1
    assert sorted(called) == ["compute"] * 9 + ["wait"] * 9, "each node is called for each group"
    assert all(0.2 <= result.timings[f"wait{i}"].busy <= 0.45 for i in range(3))


def test_slot_runs_one_node_at_a_time() -> None:
    active: set[str] = set()
    together: list[set[str]] = []

    def make(name: str) -> Node:
        async def work(batch: Batch) -> None:
            active.add(name)
            together.append(set(active))
            await asyncio.sleep(0.02)
            active.discard(name)

        return Node(name=name, run=work, inputs=("group",), slot="judge", groups=None)

    run_graph(Graph([make("a"), make("b"), make("c")]), PROMPTS)
    assert sorted(map(sorted, together)) == [["a"], ["b"], ["c"]]


def test_batch_node_drops_rows_and_later_nodes_see_the_rest() -> None:
    def prepare(batch: Batch) -> tuple[Batch, dict[str, float]]:
        kept = batch.filter([id_.endswith(("0", "2")) for id_ in batch["id"]])
        kept = kept.take(list(reversed(range(len(kept)))))
        return kept.add({"score": [float(id_[1]) for id_ in kept["id"]]}), {"dropped/count": 6.0}

    seen: list[Any] = []

    def update(batch: Batch) -> tuple[None, dict[str, float]]:
        seen.append((batch["id"], batch["score"], batch.lengths("response_tokens")))
        return None, {"loss": 0.5}

    graph = Graph(
        [
            rollout(shuffled(3)),
            Node(name="prepare", run=prepare, kind="batch", inputs=("response_tokens",), outputs=("score",)),
            Node(name="update", run=update, kind="batch", inputs=("score", "response_tokens")),
        ]
    )
    result = run_graph(graph, PROMPTS)
    kept = [id_ for id_ in ALL_IDS if id_.endswith(("0", "2"))]
    assert seen == [(kept, [float(id_[1]) for id_ in kept], [len(sample(id_)["response_tokens"]) for id_ in kept])]
    assert result.batch["id"] == ALL_IDS
    assert result.batch["score"] == [float(id_[1]) if id_ in kept else None for id_ in ALL_IDS]
    assert result.metrics == {"dropped/count": 6.0, "loss": 0.5}


def test_star_reads_the_samples_and_the_nodes_before() -> None:
    def prepare(batch: Batch) -> Batch:
        rest = batch.filter([id_ != "p1/2" for id_ in batch["id"]])
        return rest.add({"extra": list(range(len(rest)))})

    seen: list[Batch] = []
    learn = Node(name="learn", run=seen.append, kind="batch", inputs=(ANY,), after=("prepare",))
    nodes = [Node(name="prepare", run=prepare, kind="batch", inputs=(ANY, "length"), outputs=(ANY,)), learn]
    bystander = replace(
        LENGTHS, name="bystander", outputs=("aside",), run=lambda b: Batch.from_columns({"aside": b["id"]})
    )
    run_graph(Graph([rollout(ALL_IDS), *nodes, LENGTHS, bystander]), PROMPTS)
    assert seen[0]["id"] == [id_ for id_ in ALL_IDS if id_ != "p1/2"]
    assert seen[0]["extra"] == list(range(11))
    assert {"answer", "response_tokens", "length"} <= set(seen[0].columns)
    assert seen[0]["length"] == seen[0].lengths("response_tokens")
    assert "aside" not in seen[0]


def test_two_undeclared_writers_of_a_column_are_named() -> None:
    nodes = [
        Node(name=name, run=lambda b: Batch.from_columns({"x": [1] * len(b)}), inputs=("group",), outputs=(ANY,))
        for name in ("a", "b")
    ]
    with pytest.raises(DataError, match="'x' was written by 'b' and by 'a'"):
        run_graph(Graph(nodes), PROMPTS)


def test_metrics_of_calls_are_combined_by_rows() -> None:
    batch = Batch.from_columns({"group": ["a", "b", "b", "b"], "x": [1.0, 5.0, 6.0, 7.0]})

    async def work(rows: Batch) -> tuple[None, dict[str, float]]:
        await asyncio.sleep(random.random() / 100)
        x = rows["x"]
        return None, {"mean": sum(x) / len(x), "x/max": max(x), "calls/count": 1.0}

    result = run_graph(Graph([Node(name="work", run=work, inputs=("x",))], inputs=["x"]), batch)
    assert result.metrics == {"mean": 4.75, "x/max": 7.0, "calls/count": 2.0}


def test_lost_samples_are_counted_and_the_rest_goes_on() -> None:
    result = run_graph(Graph([rollout(ALL_IDS[1:8]), LENGTHS]), PROMPTS)
    assert result.batch["id"] == ALL_IDS[1:8]
    assert result.batch["length"] == [len(tokens) for tokens in result.batch["response_tokens"]]
    assert result.metrics["rollout/missing/count"] == 5.0


@pytest.mark.parametrize(
    ("node", "error", "words"),
    [
        (LENGTHS, DataError, "'lengths' reads column 'response_tokens', which the batch lacks"),
        (Node(name="n", run=lambda b: [1]), DataError, "'n' returned list"),
        (Node(name="n", run=lambda b: b, inputs=("group",), outputs=("x",)), DataError, r"'n' returned lacks \['x'\]"),
        (
            Node(name="n", run=lambda b: Batch.from_columns({"y": [1] * len(b)}), inputs=("group",)),
            DataError,
            r"'n' returned has undeclared \['y'\]",
        ),
        (
            Node(
                name="n",
                run=lambda b: Batch.from_columns({c: [1] * len(b) for c in ("bonus", "bonus/a", "bonuses")}),
                inputs=("group",),
                outputs=("bonus?", "bonus/*"),
            ),
            DataError,
            r"'n' returned has undeclared \['bonuses'\]",
        ),
        (
            Node(name="n", run=lambda b: Batch.from_columns({"x": [1] * 9}), inputs=("group",), outputs=("x",)),
            DataError,
            "'n' returned 9 rows for 1",
        ),
        (
            Node(name="n", run=lambda b: Batch.from_columns({"group": ["other"] * len(b)}), inputs=("group",)),
            DataError,
            "node 'n' returned other values of column 'group', which it was given: columns are added, never over",
        ),
        (Node(name="n", run=lambda b: 1 / 0), TrainingError, "node 'n' failed: ZeroDivisionError"),
    ],
)
def test_faults_of_a_node_carry_its_name(node: Node, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run_graph(Graph([node]), PROMPTS)


def test_a_node_may_repeat_what_it_was_given() -> None:
    """Of other types, in another order, without some rows, and with NaN."""
    batch = Batch.from_columns({"id": ["a", "b", "c"], "x": [1.0, math.nan, 3.0], "y": [[1], [2, 3], []]})

    def run(rows: Batch) -> Batch:
        return rows.take([2, 1]).drop(["y"]).add({"y": [[], [2.0, 3.0]]})

    node = Node(name="n", run=run, kind="batch", inputs=("id", "x", "y"))
    assert run_graph(Graph([node], ["x", "y"]), batch).batch["id"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("order", "words"), [(["p0/0", "p0/0"], "twice"), (["p9/0"], "unannounced"), ([], "no row is left")]
)
def test_faults_of_a_source(order: list[str], words: str) -> None:
    whole = Node(name="whole", run=lambda b: None, kind="batch", inputs=("response_tokens",))
    with pytest.raises((RolloutError, DataError), match=words):
        run_graph(Graph([rollout(order), whole]), PROMPTS)


def test_error_keeps_its_type_and_cancels_the_rest() -> None:
    cancelled: list[str] = []
    closed = threading.Event()

    async def patient(batch: Batch) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("patient")
            raise

    async def bad(batch: Batch) -> None:
        await asyncio.sleep(0.05)
        raise RewardError("the judge is down")

    def endless(prompts: Batch) -> Iterator[Batch]:
        try:
            yield Batch.from_rows([sample(id_) for id_ in ALL_IDS[:4]])
            while True:
                time.sleep(0.01)
                yield Batch.from_columns({})
        finally:
            closed.set()

    source = Node(name="rollout", run=endless, kind="source", outputs=("id",), samples=ids)
    nodes = [source, Node(name="patient", run=patient, inputs=("id",)), Node(name="bad", run=bad, inputs=("id",))]
    began = time.perf_counter()
    with pytest.raises(RewardError, match="node 'bad': the judge is down"):
        run_graph(Graph(nodes), PROMPTS)
    assert time.perf_counter() - began < 5
    assert cancelled == ["patient"]
    assert closed.is_set()


def test_running_compute_ends_before_the_error_is_seen() -> None:
    done: list[bool] = []
    started = threading.Event()

    def update(batch: Batch) -> None:
        started.set()
        time.sleep(0.3)
        done.append(True)

    async def bad(batch: Batch) -> None:
        await asyncio.get_running_loop().run_in_executor(None, started.wait)
        raise RewardError("no")

    with pytest.raises(RewardError):
        run_graph(
            Graph([Node(name="update", run=update, groups=None), Node(name="bad", run=bad, groups=None)]), PROMPTS
        )
    assert done == [True]


@pytest.mark.parametrize("kind", ["sync", "async", "source"])
def test_stall_names_the_node_and_logs_the_stacks(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hang(batch: Batch) -> Any:
        release.wait(20)
        return iter(())

    async def hang_async(batch: Batch) -> None:
        await asyncio.sleep(20)

    def hanging_source(batch: Batch) -> Iterator[Batch]:
        release.wait(20)
        yield batch

    stuck = {
        "sync": Node(name="stuck", run=hang, deadline=0.2, outputs=("reward",), groups=None),
        "async": Node(name="stuck", run=hang_async, deadline=0.2, outputs=("reward",), groups=None),
        "source": Node(name="stuck", run=hanging_source, deadline=0.2, kind="source", outputs=("reward",), samples=ids),
    }[kind]
    after = Node(name="prepare", run=lambda b: None, kind="batch", inputs=("reward",))
    began = time.perf_counter()
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(
            ClusterError,
            match=r"node 'stuck'.* within 0\.2 s( \(.*, in hang.*\))?; waiting for it: prepare",
        ),
    ):
        run_graph(Graph([stuck, after]), PROMPTS)
    assert time.perf_counter() - began < 5
    assert "stacks of all threads" in caplog.text
    if kind != "async":
        assert "release.wait" in caplog.text or "in wait" in caplog.text
    # The compute thread was replaced: the next run is not held up by the call that hangs.
    assert run_graph(Graph([Node(name="n", run=lambda b: None)]), PROMPTS).timings["n"].spans
    release.set()


def test_source_that_only_says_it_is_alive_is_a_stall() -> None:
    def endless(prompts: Batch) -> Iterator[Batch]:
        while True:
            time.sleep(0.02)
            yield Batch.from_columns({})

    source = Node(name="rollout", run=endless, kind="source", outputs=("id",), samples=ids, deadline=0.2)
    with pytest.raises(ClusterError, match=r"'rollout'.* gave no sample within 0\.2 s"):
        run_graph(Graph([source]), PROMPTS)


def test_async_function_that_blocks_the_loop_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOP_DEADLINE", 0.4)

    async def block() -> None:
        time.sleep(3)

    with pytest.raises(ClusterError, match="event loop has not moved"):
        loop.run_sync(block())
    assert run_graph(Graph([Node(name="n", run=lambda b: None)]), PROMPTS).timings["n"].spans


def test_an_async_node_of_the_user_s_that_blocks_is_late_by_name() -> None:
    async def block(batch: Batch) -> None:
        time.sleep(3)

    with pytest.raises(ClusterError, match=r"'n'.* within 0\.3 s \(.*test_groups.py line \d+, in block\)"):
        run_graph(Graph([Node(name="n", run=block, deadline=0.3)]), PROMPTS)
    assert run_graph(Graph([Node(name="n", run=lambda b: None)]), PROMPTS).timings["n"].spans


def test_run_sync_works_inside_a_running_loop_and_on_the_compute_thread() -> None:
    graph = Graph(
        [Node(name="n", run=lambda b: Batch.from_columns({"x": [1] * len(b)}), outputs=("x",), inputs=("group",))]
    )

    async def notebook() -> Result:
        return run_graph(graph, PROMPTS)

    assert asyncio.run(notebook()).batch["x"] == [1, 1, 1]

    def nested(batch: Batch) -> Batch:
        return Batch.from_columns({"y": run_graph(graph, batch).batch["x"]})

    outer = Graph([Node(name="outer", run=nested, inputs=("group",), outputs=("y",))])
    assert run_graph(outer, PROMPTS).batch["y"] == [1, 1, 1]


# Random graphs: whatever the clock does, the result is that of calling the nodes one after another.


def compute(index: int, kind: str, values: dict[str, list[int]]) -> dict[str, int]:
    """What node `index` writes, by id, from the columns it reads, by id. Kind "drop" leaves rows out."""
    out = {id_: sum((k + 1) * v for k, v in enumerate(row)) % 1009 + index for id_, row in values.items()}
    if kind != "rows":
        total = sum(out.values())
        out = {id_: (value + total) % 1009 for id_, value in out.items()}
    if kind == "drop":
        out = {id_: value for id_, value in out.items() if (value + index) % 3}
    return out


def node_of(
    index: int, inputs: list[str], kind: str, is_async: bool, groups: int | None, pauses: random.Random
) -> Node:
    def work(batch: Batch) -> tuple[Batch, dict[str, float]]:
        rows = [list(row) for row in zip(*(batch[name] for name in inputs), strict=True)]
        out = compute(index, kind, dict(zip(batch["id"], rows, strict=True)))
        ids = list(out)
        pauses.shuffle(ids)
        result = Batch.from_columns({"id": ids, f"c{index}": [out[id_] for id_ in ids]})
        return result, {f"m{index}": sum(value / 7 for value in out.values()) / max(len(out), 1)}

    def slow(batch: Batch) -> tuple[Batch, dict[str, float]]:
        time.sleep(pauses.random() / 500)
        return work(batch)

    async def slow_async(batch: Batch) -> tuple[Batch, dict[str, float]]:
        await asyncio.sleep(pauses.random() / 500)
        return work(batch)

    return Node(
        name=f"n{index}",
        run=slow_async if is_async else slow,
        kind="rows" if kind == "rows" else "batch",
        inputs=tuple(inputs),
        outputs=(f"c{index}",),
        slot=f"s{index % 3}",
        groups=groups,
    )


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[list[str], str, bool, int | None]]:
    nodes = []
    for index in range(draw(st.integers(1, 6))):
        names = ["c"] + [f"c{i}" for i in range(index)]
        inputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        kind = draw(st.sampled_from(["rows", "rows", "batch", "drop"]))
        nodes.append((inputs, kind, draw(st.booleans()), draw(st.sampled_from([1, 2, None]))))
    return nodes


@examples(60)
@given(specs=graphs(), seed=st.integers(0, 2**16), with_source=st.booleans())
def test_random_graphs_give_what_sequential_execution_gives(specs: Any, seed: int, with_source: bool) -> None:
    rng = random.Random(seed)
    names = [f"g{g}" for g in range(rng.randrange(1, 5)) for _ in range(rng.randrange(1, 4))]
    ids = [f"{name}/{i}" for i, name in enumerate(names)]
    rows = Batch.from_columns({"id": ids, "group": names, "c": [rng.randrange(1009) for _ in names]})

    columns = {"c": dict(zip(ids, rows["c"], strict=True))}
    starved = False
    for index, (inputs, kind, _, _) in enumerate(specs):
        common = [id_ for id_ in ids if all(id_ in columns[name] for name in inputs)]
        starved = starved or (kind != "rows" and not common)
        columns[f"c{index}"] = compute(index, kind, {id_: [columns[name][id_] for name in inputs] for id_ in common})

    async def generate(prompts: Batch) -> AsyncIterator[Batch]:
        order = list(range(len(rows)))
        rng.shuffle(order)
        for row in order:
            await asyncio.sleep(rng.random() / 1000)
            yield rows.slice(row, 1)

    nodes = [node_of(index, *spec, pauses=random.Random(seed + index)) for index, spec in enumerate(specs)]
    source = Node(name="source", run=generate, kind="source", outputs=("c",), slot="s0")
    graph = Graph([source, *nodes]) if with_source else Graph(nodes, inputs=["c"])
    batch = rows.drop(["c"]) if with_source else rows
    if starved:
        with pytest.raises(DataError, match="no row is left for node"):
            run_graph(graph, batch)
        return
    result, again = run_graph(graph, batch), run_graph(graph, batch)
    assert result.batch["id"] == ids
    for name, values in columns.items():
        if values:
            assert result.batch[name] == [values.get(id_) for id_ in ids]
    assert again.batch == result.batch
    assert again.metrics == result.metrics


def test_what_the_compute_thread_lets_go_of_is_freed_before_the_interpreter_ends() -> None:
    script = """
import time
from verl.dataflow import loop

class Weights:
    def __del__(self):
        time.sleep(0.3)
        print("freed", flush=True)

loop.submit(lambda weights: time.sleep(0.2), Weights()).result.result()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "freed\n", "")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_no_event_loop_bears_is_the_failure_of_its_node(error: BaseException, is_async: bool) -> None:
    def plain(batch: Batch) -> None:
        raise error

    async def waiting(batch: Batch) -> None:
        raise error

    node = Node(name="n", run=waiting if is_async else plain, inputs=("answer",))
    with pytest.raises(TrainingError, match=f"node 'n' failed: .*({type(error).__name__})"):
        run_graph(Graph([node], ["answer"]), PROMPTS, deadline=5)
    same = Node(name="n", run=lambda batch: None, inputs=("answer",))
    assert len(run_graph(Graph([same], ["answer"]), PROMPTS).batch) == 3, "the loop goes on"
