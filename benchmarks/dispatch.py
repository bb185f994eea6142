"""What the Ray executor itself costs: a step whose workers return at once, and moving a large batch.

    python benchmarks/dispatch.py
    python benchmarks/dispatch.py --workers 2 --samples 64 --megabytes 16 --repeats 3

A step is what a controller does of one of PPO: workers take their rows of a batch and generate; what they give back is
one batch, whose log-probs and values they compute; advantages and returns are added; two updates get all of it. A move
is a batch put into the object store and read by a worker; beside it stands a copy of as many bytes into shared memory.
Both are timed once the store is warm. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pyarrow as pa

from verl.batch import Batch
from verl.cluster.group import RankGroup
from verl.cluster.placement import DeviceMesh
from verl.cluster.rank_context import ALONE, RankContext, RoleMeshes, dispatch
from verl.cluster.ray.transport import RayTransport
from verl.weights.layout import Layout, Mesh

#: Milliseconds a step; the move's share of the speed of a copy.
STEP_BOUND, MOVE_BOUND = 50.0, 0.5
#: Seconds.
WARMING = 5.0


class Idle:
    """A worker that has its answers ready."""

    def __init__(self, samples: int, tokens: int, *, context: RankContext = ALONE) -> None:
        self.samples = experience(samples, tokens)

    @dispatch("train", split="rows", collect="batches")
    def generate(self, prompts: Batch) -> Iterator[Batch]:
        yield self.samples.slice(int(prompts.arrow("id")[0].as_py()), len(prompts))

    @dispatch("train", split="rows", collect="rows")
    def score(self, batch: Batch, name: str) -> Batch:
        return Batch.from_columns({name: batch.arrow("rollout_log_probs")})

    @dispatch("train")
    def update(self, batch: Batch) -> dict[str, float]:
        return {"rows": float(len(batch))}


def ragged(rows: int, values: np.ndarray) -> pa.Array:
    offsets = np.linspace(0, len(values), rows + 1).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def experience(samples: int, tokens: int) -> Batch:
    """Samples as they come from a rollout."""
    ids, floats = np.arange(samples * tokens, dtype=np.int32), np.zeros(samples * tokens, np.float32)
    columns = {"response_tokens": ragged(samples, ids), "prompt_tokens": ragged(samples, ids[: samples * 32])}
    columns["rollout_log_probs"] = ragged(samples, floats)
    columns["response_mask"] = ragged(samples, np.ones(samples * tokens, np.uint8))
    return Batch.from_columns({"id": [str(i) for i in range(samples)], **columns})


def milliseconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Times of `work` once it has run for `WARMING` seconds: only then does Ray, which frees late, reuse its memory."""
    times, began = [], time.perf_counter()
    while len(times) < repeats:
        start = time.perf_counter()
        work()
        if start - began > WARMING:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the Ray executor itself.")
    for name, default in (("workers", 4), ("samples", 1024), ("tokens", 512), ("megabytes", 256), ("repeats", 50)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args()
    job = RayTransport(DeviceMesh(f"cpu:0-{args.workers - 1}"), timeout=120)
    ranks = tuple(range(args.workers))
    group = RankGroup(
        RoleMeshes("idle", {"train": Mesh(tuple(ranks), Layout(replicate=len(ranks)))}),
        partial(Idle, args.samples, args.tokens),
        job,
    )
    batch = experience(args.samples, args.tokens)
    computed = {name: batch.arrow("rollout_log_probs") for name in ("advantages", "returns")}
    size = batch.nbytes + 4 * batch.select(["rollout_log_probs"]).nbytes

    def step() -> None:
        samples = Batch.concat(group.call(Idle.generate, batch.select(["id", "prompt_tokens"])))
        scores = [group.call(Idle.score, samples, name) for name in ("log_probs", "values")]
        samples = samples.add(scores[0]).add(scores[1]).add(computed)
        for _ in ("actor", "critic"):
            group.call(Idle.update, samples)

    taken = statistics.median(milliseconds(step, args.repeats))
    samples = f"{args.samples} samples of {args.tokens} tokens"
    rows = f"{args.workers} workers, {samples}, {size / 1e6:.0f} MB before an update"
    print(f"step: {taken:.1f} ms ({rows}); bound {STEP_BOUND:g} ms: {'met' if taken <= STEP_BOUND else 'MISSED'}")

    values = np.ones(args.megabytes * 2**20 // 4, np.float32)
    large = Batch.from_columns({"values": ragged(256, values)})
    one = RankGroup(RoleMeshes("one", {"train": Mesh()}), partial(Idle, 1, 1), job)
    shared = SharedMemory(create=True, size=values.nbytes)
    source = memoryview(values).cast("B")
    copy = min(milliseconds(lambda: shared.buf.__setitem__(slice(len(source)), source), args.repeats))
    move = min(milliseconds(lambda: one.call(Idle.update, Batch(large.table.slice(0))), args.repeats))
    shared.close()
    shared.unlink()
    share = copy / move
    verdict = "met" if share >= MOVE_BOUND else "MISSED"
    print(f"move: {args.megabytes} MB in {move:.1f} ms, {share:.2f} of the speed of a copy into shared memory "
          f"({copy:.1f} ms); bound {MOVE_BOUND:g}: {verdict}")  # fmt: skip
    job.close()


if __name__ == "__main__":
    main()
