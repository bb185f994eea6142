"""Weights from the training into the generation layout: what it costs, counted and timed.

    python benchmarks/transition.py --layout 1-4-2 --tg 2
    python benchmarks/transition.py --layout 1-4-2 --tg 2 --slow 50            as root: links of 50 Mbit/s
    python benchmarks/transition.py --layout 1-4-1 --tg 1 --slow 50 --overlap --trace trace.json

Each rank is a process. The first form prints bytes received, peak parameter memory and redundancy, as they were
measured, beside the three columns of the HybridFlow paper (arXiv 2409.19256, table 2). `--slow` puts each rank into a
network namespace of its own, on a link of so many Mbit/s each way, and compares the time with gathering over all ranks;
`--overlap` generates while weights arrive. The model is a Llama with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from moved import MeasuredWeights, is_cut, moved_bytes, paper_table
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from verl.batch import Batch
from verl.training.options import EngineOptions
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh, generation_mesh
from verl.weights.shards import named_weights

MB = 1e6
DEADLINE = 300
#: The network interface of a rank in its namespace.
LINK = "uplink"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


def main() -> None:
    args = arguments()
    pp, tp, replicate = (int(size) for size in args.layout.split("-"))
    train = Layout(pp=pp, tp=tp, replicate=replicate)
    if args.slow and (why := why_not_slow()):
        sys.exit(f"DID NOT RUN: --slow needs {why}; nothing was measured on slowed links")
    with slow_links(train.size, args.slow) if args.slow else contextlib.nullcontext() as names:
        answers = on_ranks(train.size, args, train, names)
    if args.slow and args.overlap:
        report_overlap(answers, args)
    elif args.slow:
        report_time(answers, args, train)
    else:
        report_bytes(answers, args, train)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="1-4-2", help="training: stages-tensor-data (p-t-d)")
    parser.add_argument("--pg", type=int, default=1, help="stages in generation")
    parser.add_argument("--tg", type=int, default=2, help="tensor-parallel ranks in generation")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket", type=float, default=4.0, help="MB of weights that travel at a time")
    parser.add_argument("--slow", type=float, metavar="MBIT", help="links between ranks of so many Mbit/s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--overlap", action="store_true", help="with --slow: generate while weights arrive")
    parser.add_argument("--tokens", type=int, default=2560, help="with --overlap: of the prompts of a rank")
    parser.add_argument("--trace", help="with --overlap: write a Chrome trace of rank 0 to this file")
    args = parser.parse_args()
    if args.overlap and not args.slow:
        parser.error("--overlap needs --slow: links of memory speed hide nothing worth hiding")
    if args.trace and not args.overlap:
        parser.error("--trace needs --overlap")
    return args


# What a rank does


def rank_main(rank: int, args: argparse.Namespace, train: Layout, name: str | None, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    if name is not None:
        enter_network(name)
        os.environ["GLOO_SOCKET_IFNAME"] = LINK
    address = f"tcp://{'10.77.0.1' if name is not None else '127.0.0.1'}:{port}"
    deadline = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=train.size, timeout=deadline)
    group = dist.new_group(timeout=deadline)
    measure = measure_overlap if args.overlap else measure_transition
    answers.put((rank, measure(args, train, group)))
    dist.barrier()
    dist.destroy_process_group()


def engine_of(args: argparse.Namespace, mesh: Mesh, group: Any) -> TorchEngine:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return TorchEngine(model, EngineOptions(), mesh=mesh, group=group)


def measure_transition(args: argparse.Namespace, train: Layout, group: Any) -> dict[str, Any]:
    """Bytes of ours and, on slow links, seconds of ours and of gathering over all ranks."""
    found: dict[str, Any] = {}
    layouts = {"ours": (train, args.pg, args.tg)}
    if args.slow and not args.overlap:
        layouts["all ranks"] = (Layout(shard=train.size), 1, 1)
    for name, (layout, pg, tg) in layouts.items():
        mesh = Mesh(tuple(range(layout.size)), layout)
        engine = engine_of(args, mesh, group)
        target = generation_mesh(mesh, pg, tg)
        weights = MeasuredWeights(engine, target, group, overlap=False, bucket_bytes=int(args.bucket * MB))
        seconds = [timed_transition(weights) for _ in range(1 + args.repeats)][1:]
        moved = moved_bytes(weights.plan, dist.get_rank(), cut_alone=True)
        copies = moved_bytes(weights.plan, dist.get_rank()).target - moved.target
        specs = weights.plan.specs.values()
        found[name] = {
            "seconds": seconds,
            "cut": sum(spec.nbytes for spec in specs if is_cut(weights.plan, spec.name)),
            "received": weights.received,
            "planned": moved.received,
            "peak": weights.peak,
            "staged": weights.staged,
            "whole": copies,
            "redundant": weights.redundant,
        }
    return found


def timed_transition(weights: MeasuredWeights) -> float:
    dist.barrier()
    began = time.perf_counter()
    weights.start()
    weights.wait()
    seconds = time.perf_counter() - began
    weights.release()
    return seconds


def measure_overlap(args: argparse.Namespace, train: Layout, group: Any) -> dict[str, Any]:
    """Seconds of the transition, of a prompt's forward under generation's layout, and of both at once."""
    mesh = Mesh(tuple(range(train.size)), train)
    engine = engine_of(args, mesh, group)
    target = generation_mesh(mesh, 1, args.tg)
    model = engine_of(args, target, dist.new_group(timeout=timedelta(seconds=DEADLINE)))
    targets = dict(named_weights(model.model))
    weights = MeasuredWeights(engine, target, group, targets, bucket_bytes=int(args.bucket * MB))
    forward = Forwards(model, weights)
    length = min(args.tokens, 512) - 1
    rows = max(1, args.tokens // (length + 1))
    # Prompts differ: equal ones would be computed once.
    prompts = [[row, *[5] * (length - 1)] for row in range(rows)]
    batch = Batch.from_columns({"prompt_tokens": prompts, "response_tokens": [[7]] * rows})

    def run(transfer: bool, prompts: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        if transfer:
            weights.start()
        if prompts:
            model.predict(batch, ("log_probs",))
        weights.wait()
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {"transition": [], "prompts": [], "both": []}
    for repeat in range(1 + args.repeats):
        alone = run(True, False)
        prompts = run(False, True)
        weights.release()
        forward.spans.clear()
        began = time.perf_counter()
        both = run(True, True)
        trace = chrome_trace(began, weights, forward) if args.trace else None
        weights.release()
        if repeat:  # the first warms up
            for name, value in (("transition", alone), ("prompts", prompts), ("both", both)):
                seconds[name].append(value)
    return {"seconds": seconds, "trace": trace}


class Forwards:
    """Makes the modules of a model wait for their weights, and notes when each layer ran.

    Attributes:
        spans: (name, begin, end) in seconds of `time.perf_counter`.
    """

    def __init__(self, engine: TorchEngine, weights: MeasuredWeights) -> None:
        self.spans: list[tuple[str, float, float]] = []
        known = {id(weight): name for name, weight in named_weights(engine.model)}
        for module in engine.model.modules():
            names = [known[id(weight)] for weight in module._parameters.values() if weight is not None]
            if names:
                module.register_forward_pre_hook(self._waiting(names, weights))
        for number, layer in enumerate(engine.model.model.layers):
            self._note(f"layer {number}", layer)

    def _waiting(self, names: list[str], weights: MeasuredWeights) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            began = time.perf_counter()
            for name in names:
                weights.ready(name)
            if (now := time.perf_counter()) - began > 1e-3:
                self.spans.append((f"wait for {names[0]}", began, now))

        return wait

    def _note(self, name: str, layer: nn.Module) -> None:
        begun: list[float] = []
        layer.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
        layer.register_forward_hook(lambda *_: self.spans.append((name, begun.pop(), time.perf_counter())))


def chrome_trace(began: float, weights: MeasuredWeights, forward: Forwards) -> list[dict[str, Any]]:
    """Events of one rank: buckets in one row, layers in another."""
    rows = [(f"bucket {number}", *span, "weights") for number, span in enumerate(weights.spans)]
    rows += [(*span, "waiting" if span[0].startswith("wait") else "prompts") for span in forward.spans]
    return [
        {"name": name, "ph": "X", "ts": (a - began) * 1e6, "dur": (b - a) * 1e6, "pid": dist.get_rank(), "tid": row}
        for name, a, b, row in rows
    ]


# Processes and links


def on_ranks(size: int, args: argparse.Namespace, train: Layout, names: list[str] | None) -> list[Any]:
    """The answers of all ranks, each a fork of this process."""
    context = multiprocessing.get_context("fork")
    answers, port = context.SimpleQueue(), 20000 + os.getpid() % 10000
    ranks = [
        context.Process(target=rank_main, args=(rank, args, train, names and names[rank], port, answers), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < size:
        if not answers.empty():
            rank, answer = answers.get()
            found[rank] = answer
        elif any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        else:
            time.sleep(0.05)
    for process in ranks:
        process.join(DEADLINE)
    return [found[rank] for rank in range(size)]


def why_not_slow() -> str | None:
    """What is missing for slowed links."""
    if os.geteuid() != 0:
        return "root (network namespaces)"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"the program {' and '.join(missing)} (iproute2)"
    return None


@contextlib.contextmanager
def slow_links(size: int, mbit: float) -> Iterator[list[str]]:
    """Network namespaces for ranks, joined by a bridge, each on a link of so many Mbit/s each way."""
    names, switch = [f"verl-{os.getpid()}-{rank}" for rank in range(size)], f"verl-{os.getpid()}-switch"
    limit = f"tbf rate {mbit:g}mbit burst 32kb latency 200ms"
    try:
        sh(f"ip netns add {switch}")
        inside = f"ip netns exec {switch}"
        sh(f"{inside} ip link add bridge type bridge")
        sh(f"{inside} ip link set bridge up")
        for rank, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip link add name {LINK} netns {name} type veth peer name port{rank} netns {switch}")
            sh(f"{inside} ip link set port{rank} master bridge up")
            sh(f"{inside} tc qdisc add dev port{rank} root {limit}")
            sh(f"ip netns exec {name} tc qdisc add dev {LINK} root {limit}")
            sh(f"ip netns exec {name} ip addr add 10.77.0.{rank + 1}/24 dev {LINK}")
            sh(f"ip netns exec {name} ip link set {LINK} up")
            sh(f"ip netns exec {name} ip link set lo up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def sh(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"DID NOT RUN: {line}: {done.stderr.strip()}")


def enter_network(name: str) -> None:
    with open(f"/var/run/netns/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"network namespace {name}")


# Reports


def report_bytes(answers: list[Any], args: argparse.Namespace, train: Layout) -> None:
    found = [answer["ours"] for answer in answers]
    total = found[0]["cut"]
    table = paper_table(train, Layout(pp=args.pg, tp=args.tg))
    mean = {key: statistics.mean(one[key] for one in found) for key in found[0] if key != "seconds"}
    print(f"training {args.layout}, generation {args.pg}-{args.tg}; weights that are cut: M = {total / MB:.3f} MB")
    print(f"{'MB a rank':<34}{'received':>12}{'peak':>12}{'redundant':>12}")
    for name, column in table.items():
        print(f"{'formula, ' + name:<34}" + "".join(f"{share * total / MB:>12.3f}" for share in column))
    measured = (mean["planned"], mean["peak"] - mean["whole"] - mean["staged"], mean["redundant"])
    print(f"{'measured, ours':<34}" + "".join(f"{value / MB:>12.3f}" for value in measured))
    others, staged = (mean["received"] - mean["planned"], mean["whole"]), mean["staged"]
    print(
        f"beside these: {others[0] / MB:.3f} MB received and {others[1] / MB:.3f} MB held of weights that are not cut "
        f"(norms); messages of at most {staged / MB:.3f} MB"
    )


def report_time(answers: list[Any], args: argparse.Namespace, train: Layout) -> None:
    table = paper_table(train, Layout(pp=args.pg, tp=args.tg))
    seconds = {
        name: statistics.median(
            max(times) for times in zip(*(answer[name]["seconds"] for answer in answers), strict=True)
        )
        for name in ("ours", "all ranks")
    }
    for name, value in seconds.items():
        received = statistics.mean(answer[name]["received"] for answer in answers)
        rate = received * 8 / value / 1e6
        print(f"{name:<12} {value:8.3f} s   {received / MB:8.3f} MB a rank   {rate:6.1f} of {args.slow:g} Mbit/s")
    formula = table["all ranks"].received / table["ours"].received
    ratio = seconds["all ranks"] / seconds["ours"]
    print(f"ratio {ratio:.2f}, by the formula {formula:.2f}: {ratio / formula:.2f} of it (at least 0.85 is wanted)")


def report_overlap(answers: list[Any], args: argparse.Namespace) -> None:
    slowest = {
        name: statistics.median(
            max(times) for times in zip(*(answer["seconds"][name] for answer in answers), strict=True)
        )
        for name in ("transition", "prompts", "both")
    }
    for name, value in slowest.items():
        print(f"{name:<12} {value:8.3f} s")
    hidden = 1 - (slowest["both"] - slowest["prompts"]) / slowest["transition"]
    print(f"hidden: {hidden:.0%} of the transition (at least 40 % is wanted)")
    if args.trace:
        with open(args.trace, "w") as file:
            json.dump({"traceEvents": [event for answer in answers for event in answer["trace"]]}, file)


if __name__ == "__main__":
    main()
