"""What matrix products alone would take here: the ceiling that rollout.py, grpo_step.py and growth.py measure against.

    .venv/bin/python benchmarks/ceiling.py --tokens 256 --rows 256               # a decode step of 256 sequences
    .venv/bin/python benchmarks/ceiling.py --tokens 2000 --rows 1024 --backward  # a micro-batch of an update
    .venv/bin/python benchmarks/ceiling.py --tokens 256 2048 --rows 256 256 --dtype bfloat16 --threads 1

A forward is a pair of numbers: the tokens that go through the layers, and the rows of them that go through the head.
Its products are those of every linear layer with its tokens and of the head with its rows; of an update also the two of
the backward pass, to the inputs and to the weights. Nothing else is counted: no attention, no norms, no sampling, no
optimizer, and neither padding nor what is computed a second time. So no run is faster than its ceiling, and
the share of it that a run reaches says how much stands beside the products.

torch alone times them, in a process of its own that has weights of the model's shapes and nothing of this package, with
the threads of the run. Weights that see the same input (query, key, value; gate, up) are multiplied one by one and as
one matrix, and the faster way counts. `Forwards` records the pairs as they come while a run goes on, with prompts
shared and rows packed as they were; `Ceiling.seconds` times them when the run has ended its turn, so that what else the
machine does slows both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import workload

os.environ["HF_HUB_OFFLINE"] = "1"

#: Logits that are there at a time.
_CHUNK = 1 << 25
#: Timings of a shape, of which the median counts, after one that does not.
_REPEATS = 3
#: From so many rows on, without and with a backward pass, reading a weight is nothing beside the products: a few
#: weights of one shape are timed for all. Below, all of a pass are, one after the other, so that they come from memory
#: as in a run.
_MANY, _FEW = {False: 512, True: 128}, 4
#: Shapes that are timed for one run; the seconds of others are interpolated between them.
_SHAPES = 16
#: Layers that see one input.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Shape(NamedTuple):
    """One forward: tokens through the layers, rows through the head, and whether a backward pass follows."""

    tokens: int
    rows: int
    backward: bool = False


@dataclass
class Forwards:
    """What was computed while it was recorded: how often each shape, in generation and in training."""

    rollout: Counter[Shape] = field(default_factory=Counter)
    update: Counter[Shape] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def recorded(cls) -> Iterator[Forwards]:
        """Of all engines of this process inside the block; the caller may `clear` it between two runs."""
        import torch

        from verl.rollout.embedded.runner import ModelRunner
        from verl.training.forward import Forward

        seen, run, forward = cls(), ModelRunner.run, Forward.forward

        def recorded_run(runner: Any, batch: Any, *args: Any, **options: Any) -> Any:
            seen.rollout[Shape(len(batch.tokens), len(batch.samples))] += 1
            return run(runner, batch, *args, **options)

        def recorded_forward(self: Any, flat: Any, *args: Any, **options: Any) -> Any:
            seen.update[Shape(len(flat.tokens), len(flat.predict), torch.is_grad_enabled())] += 1
            return forward(self, flat, *args, **options)

        ModelRunner.run, Forward.forward = recorded_run, recorded_forward  # type: ignore[method-assign]
        try:
            yield seen
        finally:
            ModelRunner.run, Forward.forward = run, forward  # type: ignore[method-assign]

    def clear(self) -> None:
        self.rollout.clear()
        self.update.clear()


class Ceiling:
    """A process that times products, and sleeps until it is asked; leave the `with` block to end it.

    Args:
        model: a directory; its shapes count, its weights are not read.
        dtype: "bfloat16" or "float32".
    """

    def __init__(self, model: str | Path, dtype: str, threads: int, device: str = "cpu") -> None:
        command = [sys.executable, __file__, "--model", str(model), "--dtype", dtype]
        command += ["--threads", str(threads), "--device", device, "--serve"]
        environment = workload.environment(OMP_NUM_THREADS=str(threads))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()  # it is ready

    def __enter__(self) -> Ceiling:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        # Its end of file would wait for every process that was forked meanwhile and has the pipe open.
        print("null", file=self._process.stdin, flush=True)
        self._process.wait(60)
        self._process.stdin.close()

    def seconds(self, shapes: Mapping[Shape, int]) -> float:
        """How long the products of so many forwards of each shape take.

        Raises:
            RuntimeError: the process has ended; standard error says why.
        """
        assert self._process.stdin is not None
        print(json.dumps([[*shape, count] for shape, count in shapes.items()]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that times products has ended with {self._process.wait(60)}")
        return json.loads(line)


class Products:
    """Weights of a model's shapes, and the time that products with them take.

    Raises:
        SystemExit: the model has matrices that are no linear layers (experts), which nothing here would count.
    """

    def __init__(self, model: str | Path, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        head = shell.get_output_embeddings()
        linears = {name: m for name, m in shell.base_model.named_modules() if isinstance(m, torch.nn.Linear)}
        counted = {id(m.weight) for m in [head, *linears.values()]}
        counted |= {id(m.weight) for m in shell.modules() if isinstance(m, torch.nn.Embedding)}
        if other := [name for name, p in shell.named_parameters() if p.dim() > 1 and id(p) not in counted]:
            raise SystemExit(f"{model}: {other[0]} is no linear layer, its products cannot be timed")
        self.device = device
        options = {"dtype": getattr(torch, dtype), "device": device}
        joined = []
        for names in _groups(linears):
            rows = [linears[name].out_features for name in names]
            joined.append((torch.randn(sum(rows), linears[names[0]].in_features, **options) * 0.02, rows))
        #: The layers' weights, those with one input as one matrix, and each for itself: views of the same memory.
        self.ways = [[weight for weight, _ in joined], [part for weight, rows in joined for part in weight.split(rows)]]
        self.head = torch.randn(head.out_features, head.in_features, **options) * 0.02
        self._known: dict[tuple[bool, bool, int], float] = {}

    def flops(self, shape: Shape) -> float:
        layers, head = sum(weight.numel() for weight in self.ways[0]), self.head.numel()
        return 2.0 * (shape.tokens * layers + shape.rows * head) * (3 if shape.backward else 1)

    def seconds(self, shapes: Mapping[Shape, int]) -> float:
        """Of so many forwards of each shape."""
        total = 0.0
        for backward in (False, True):
            some = {shape: count for shape, count in shapes.items() if shape.backward is backward}
            tokens, rows = Counter[int](), Counter[int]()
            for shape, count in some.items():
                tokens[shape.tokens] += count
                rows[shape.rows] += count
            total += _interpolated(tokens, lambda n, b=backward: min(self.timed(way, n, b) for way in self.ways))
            total += _interpolated(rows, lambda n, b=backward: self.timed([self.head], n, b))
        return total

    def timed(self, weights: Sequence[Any], count: int, backward: bool) -> float:
        """Seconds of the products of `count` rows with each of these weights."""
        chunk = max(1, min(count, _CHUNK // max(len(weight) for weight in weights)))
        parts = Counter(min(chunk, count - start) for start in range(0, count, chunk))
        alike: list[list[Any]] = [list(weights)]
        if count >= _MANY[backward]:
            by_shape: dict[Any, list[Any]] = {}
            for weight in weights:
                by_shape.setdefault(weight.shape, []).append(weight)
            alike = [*by_shape.values()]
        total = 0.0
        for same in alike:
            some = same[:_FEW] if count >= _MANY[backward] else same
            once = sum(times * self._median(some, rows, backward) for rows, times in parts.items())
            total += once * len(same) / len(some)
        return total

    def _median(self, weights: Sequence[Any], rows: int, backward: bool) -> float:
        import torch

        options = {"dtype": self.head.dtype, "device": self.device}
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1], **options) for weight in weights}
        grads = {len(weight): torch.randn(rows, len(weight), **options) for weight in weights if backward}
        times = []
        for _ in range(1 + _REPEATS):
            self._wait()
            start = time.perf_counter()
            for weight in weights:
                x = inputs[weight.shape[1]]
                torch.mm(x, weight.t())
                if backward:
                    grad = grads[len(weight)]
                    torch.mm(grad, weight)
                    torch.mm(grad.t(), x)
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.accelerator.synchronize()


def _groups(linears: Mapping[str, Any]) -> list[list[str]]:
    """Names of layers, those that see one input together."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in linears:
        parent, _, last = name.rpartition(".")
        kind = next((kind for kind in _JOINED if last in kind), None)
        groups.setdefault((parent, kind or last), []).append(name)
    return [*groups.values()]


def _interpolated(counts: Mapping[int, int], seconds: Callable[[int], float]) -> float:
    """The sum over sizes of count x seconds, where `_SHAPES` sizes at most are timed, the smallest and the largest
    among them."""
    import numpy as np

    sizes = sorted(size for size in counts if size)
    if not sizes:
        return 0.0
    picked = sorted({sizes[int(i)] for i in np.linspace(0, len(sizes) - 1, min(_SHAPES, len(sizes)))})
    timed = [seconds(size) for size in picked]
    return float(sum(counts[size] * np.interp(size, picked, timed) for size in sizes))


def serve(products: Products) -> None:
    """Answer each line of shapes and counts with the seconds that their products take."""
    print(json.dumps("ready"), flush=True)
    for request in map(json.loads, sys.stdin):
        if request is None:
            return
        shapes = {Shape(tokens, rows, backward): count for tokens, rows, backward, count in request}
        print(json.dumps(products.seconds(shapes)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256], help="of each forward, through the layers")
    parser.add_argument("--rows", type=int, nargs="+", help="of each forward, through the head (default: --tokens)")
    parser.add_argument("--backward", action="store_true", help="with the products of a backward pass")
    parser.add_argument("--model", default=str(workload.MODEL), help="a directory with a config.json")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = args.rows or args.tokens
    if len(rows) != len(args.tokens):
        parser.error("--tokens and --rows have one number each for every forward")
    import torch

    torch.set_num_threads(args.threads)
    products = Products(args.model, args.dtype, args.device)
    if args.serve:
        return serve(products)
    for pair in zip(args.tokens, rows, strict=True):
        shape = Shape(*pair, args.backward)
        seconds = products.seconds({shape: 1})
        rate = products.flops(shape) / seconds / 1e9
        print(json.dumps(shape._asdict() | {"seconds": round(seconds, 4), "gflop_per_second": round(rate, 1)}))


if __name__ == "__main__":
    main()
