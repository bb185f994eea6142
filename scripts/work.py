"""Count the work that small, seeded runs do, and compare it with the numbers on record.

    python scripts/work.py              # 5 % more than tests/work.json of anything? then exit status 1
    python scripts/work.py --record     # write the record anew; the message of the commit says what grew, and why

Three pieces of work on a tiny model: `start`, all of `verl train` before its first step; `rollout`, 8 samples of 12
tokens; `step`, a GRPO step on as many. The last two are counted with the compiled kernels (where there is a compiler)
and without, the first without. No clock decides a count, nor do the processor and the number of threads: the model is
in fp32, every response has its full length, and rollout and step run once before they count. So work that grows without
a reason is seen on a busy machine too. What is counted:

    operators      calls of torch's operators, those of backward passes among them
    products       of matrices, also within attention; megaflops: what these are
    kernels        calls of compiled kernels
    copied         kilobytes that copies and casts of tensors write
    waits          reads of a tensor's numbers by Python
    functions      calls of functions of this package
    modules        of this package that were imported
    processes      that were started

A count that falls is no failure; the command says so, and the record is to be made anew for it to be kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "work.json"
#: What a count may grow by unsaid.
GROWTH = 0.05
SECONDS = 250
SAMPLES, TOKENS = 4, 12
PROMPTS = ["once upon a time", "why?"]

Counts = dict[str, dict[str, int]]


class Meter:
    """Counts what all threads of this process do while it runs; made before they are."""

    def __init__(self) -> None:
        from verl.kernels.compiled import Kernels

        self.running = False
        self._counters: list[Counter[str]] = []
        self._local = threading.local()
        self._package = str(ROOT / "verl") + os.sep
        self._enter()
        run_thread, run_kernel = threading.Thread.run, Kernels._run

        def run(thread: threading.Thread) -> None:
            self._enter()
            run_thread(thread)

        def counted(compiled: Kernels, *args: Any) -> None:
            self.add(kernels=1)
            run_kernel(compiled, *args)

        threading.Thread.run, Kernels._run = run, counted  # type: ignore[method-assign]
        sys.addaudithook(self._audit)
        self._count_reads()

    def add(self, **numbers: int) -> None:
        if self.running:
            self._counter.update(numbers)

    @contextmanager
    def counting(self, into: Counter[str]) -> Iterator[None]:
        for counter in self._counters:
            counter.clear()
        self.running = True
        try:
            yield
        finally:
            self.running = False
            for counter in self._counters:
                into.update(counter)

    @property
    def _counter(self) -> Counter[str]:
        if not hasattr(self._local, "counter"):
            self._local.counter = Counter()
            self._counters.append(self._local.counter)
        return self._local.counter  # type: ignore[no-any-return]

    def _enter(self) -> None:
        """From now on the calls of this thread are seen."""
        _Operators(self).__enter__()
        sys.setprofile(self._profile)

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are functions in old versions of Python alone.
        if self.running and event == "call" and code.co_filename.startswith(self._package) and code.co_name[0] != "<":
            self._counter["functions"] += 1

    def _audit(self, event: str, _: Any) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.add(processes=1)

    def _count_reads(self) -> None:
        """On CPU these are no operators."""
        import torch

        for name in ("tolist", "numpy", "cpu"):
            read = getattr(torch.Tensor, name)

            def method(tensor: Any, *args: Any, read: Callable[..., Any] = read, **options: Any) -> Any:
                self.add(waits=1)
                return read(tensor, *args, **options)

            setattr(torch.Tensor, name, method)


def _Operators(meter: Meter) -> Any:  # noqa: N802 - torch is imported late, for the sake of `modules`
    """The mode that sees the operators of one thread."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    onednn_linear = torch.ops.mkldnn._linear_pointwise  # of the head in fp32, unknown to torch's registry
    if onednn_linear not in flop_registry:
        register_flop_formula(onednn_linear)(lambda x, weight, *_, **__: 2 * x[0] * weight[0] * x[1])

    aten = torch.ops.aten
    copies = {aten.copy_, aten._to_copy, aten.clone, aten._copy_from}
    reads = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2}

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if meter.running:
                packet = func._overloadpacket
                numbers = {"operators": 1}
                if packet in flop_registry:
                    flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
                    numbers |= {"products": 1, "flops": int(flops)}
                if packet in copies:
                    numbers["copied"] = out.nbytes
                if packet in reads:
                    numbers["waits"] = 1
                meter.add(**numbers)
            return out

    return Operators()


def early(texts: list[str]) -> list[float]:
    """Another number for every sample, whatever it says: no row is without a gradient."""
    return [float(i) for i in range(len(texts))]


def make_model(folder: Path) -> str:
    """A tiny Llama whose sizes the compiled kernels take, in fp32, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<end>", *"abcdefghijklmnopqrstuvwxyz ,.?!0123456789+-=\nABCDEFGHI"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(letters)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**ids, **sizes, num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def start(meter: Meter, model: str, folder: Path) -> Counter[str]:
    """`verl train` up to its first step."""
    from verl.cli.main import app
    from verl.trainer.trainer import Trainer

    data, reward = folder / "data.jsonl", folder / "reward.py"
    reward.write_text("def reward(text):\n    return float(len(text))\n")
    data.write_text("".join(json.dumps({"prompt": f"{i} + {i} =", "answer": f"{2 * i}"}) + "\n" for i in range(32)))
    settings = {
        "actor_rollout_ref.model.path": model, "actor_rollout_ref.model.dtype": "float32", "data.train": data,
        "actor_rollout_ref.rollout.n": SAMPLES, "actor_rollout_ref.rollout.max_new_tokens": TOKENS,
        "actor_rollout_ref.rollout.kv_cache_gb": 0.05, "data.batch_size": 2, "reward.path": f"{reward}:reward",
        "trainer.total_steps": 1, "trainer.output_dir": folder / "runs", "trainer.loggers": "[]",
    }  # fmt: skip
    counts: Counter[str] = Counter()

    class Begun(Exception):  # noqa: N818 - no error
        pass

    def begin(*_: Any, **__: Any) -> None:
        meter.running = False
        raise Begun

    fit, Trainer.fit = Trainer.fit, begin  # type: ignore[method-assign, assignment]
    try:
        with meter.counting(counts):
            app(["train", *(f"{key}={value}" for key, value in settings.items())], standalone_mode=False)
    except Begun:
        pass
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]
    counts["modules"] = sum(name.partition(".")[0] == "verl" for name in sys.modules)
    return counts


def rollout_and_step(meter: Meter, model: str) -> dict[str, Counter[str]]:
    """One of each, after one that does not count."""
    import verl

    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    actor = verl.Actor(model, dtype="float32", sampling=sampling, rollout="embedded", kv_cache_gb=0.05, seed=0)
    trainer = verl.Trainer(actor, reward_fn=early, algorithm="grpo", n=SAMPLES, log_dir=False)
    work: dict[str, Callable[[], Any]] = {
        "rollout": lambda: actor.generate_sequences(PROMPTS, n=SAMPLES),
        "step": lambda: trainer.step(PROMPTS),
    }
    counted = {}
    for name, call in work.items():
        call()
        counted[name] = Counter[str]()
        with meter.counting(counted[name]):
            call()
    trainer.close()
    return counted


def count(folder: Path) -> Counts:
    """All counts of this process, by the name of the work."""
    import torch

    torch.set_num_threads(1)
    model = make_model(folder / "model")
    meter = Meter()
    from verl.kernels import build, compiled

    has_compiler = build.library() is not None  # built here, if they were not there
    find = build.find_compiler

    def use_kernels(use: bool) -> None:
        build.find_compiler = find if use else lambda: None
        build.library.cache_clear()
        compiled.kernels.cache_clear()

    use_kernels(False)
    counts = {"start": start(meter, model, folder)}
    counts |= {f"{name}, torch": n for name, n in rollout_and_step(meter, model).items()}
    use_kernels(True)
    if has_compiler:
        counts |= {f"{name}, kernels": n for name, n in rollout_and_step(meter, model).items()}
    for numbers in counts.values():
        # In units that no rounding of a size changes.
        numbers["megaflops"], numbers["copied"] = numbers.pop("flops", 0) // 10**6, numbers["copied"] // 1000
    return {name: {key: n for key, n in sorted(numbers.items()) if n} for name, numbers in counts.items()}


def counted() -> Counts:
    """The counts, from a process of its own in which nothing has been imported before.

    Raises:
        SystemExit: it failed.
    """
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="verl-work-") as folder:
        file = Path(folder) / "counts.json"
        command = [sys.executable, __file__, "--count", str(file)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise SystemExit(f"the work failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        counts: Counts = json.loads(file.read_text())
    return counts


def differences(record: Mapping[str, Mapping[str, int]], counts: Counts) -> tuple[list[str], list[str]]:
    """What grew beyond the bound, and what fell by as much, in words. Work that cannot be counted here, for want of a
    compiler, is no difference."""
    grew, fell = [], []
    for work, numbers in counts.items():
        before = record.get(work, {})
        for name in sorted({*before, *numbers}):
            old, new = before.get(name, 0), numbers.get(name, 0)
            bound = GROWTH * old
            line = f"{work}: {name} {old:,} -> {new:,}" + (f" ({new / old - 1:+.1%})" if old else "")
            if new - old > bound:
                grew.append(line)
            elif old - new > bound:
                fell.append(line)
    return grew, fell


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write tests/work.json anew")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        args.count.write_text(json.dumps(count(args.count.parent)))
        os._exit(0)  # threads of libraries may still be there, which at the interpreter's end can abort the process
    counts = counted()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    grew, fell = differences(record, counts)
    for heading, lines in (("More work than on record:", grew), ("Less work than on record:", fell)):
        print("\n  ".join([heading, *lines]) + "\n" if lines else "", end="")
    if args.record:
        RECORD.write_text(json.dumps(record | counts, indent=1) + "\n")
        print(f"written: {RECORD.relative_to(ROOT)}")
        return 0
    if grew:
        print("If this is meant: python scripts/work.py --record, and say in the commit what grew, and why.")
    elif not fell:
        print("as on record")
    return bool(grew)


if __name__ == "__main__":
    sys.exit(main())
