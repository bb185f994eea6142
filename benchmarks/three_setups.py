"""One GRPO step in three set-ups on the same work: plain Hugging Face and DeepSpeed; ours with FSDP; ours with vLLM and
the hybrid engine.

    .venv/bin/python benchmarks/three_setups.py                    # one rank on a CPU, all GPUs of a machine with some
    .venv/bin/python benchmarks/three_setups.py --ranks 4 --setups plain fsdp

For each: tokens/s of the rollout, samples/s of the update, the peak memory of a rank and what it started (resident
memory on a CPU; of the device elsewhere), seconds a step; then how many times as fast as the first a whole step is.
Each set-up runs in processes of its own, started by torchrun, one after the other. The first is timed at several
micro-batch sizes, and stands at its best. vLLM runs in an environment of its own (`make vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import workload

ROOT = Path(__file__).resolve().parent.parent
SETUPS = {"plain": "Hugging Face + DeepSpeed", "fsdp": "verl + FSDP", "vllm": "verl + vLLM + hybrid engine"}
#: Rollout tokens/s, training samples/s, GB: the figures of the article, on four A100.
ARTICLE = {"plain": (18_500, 3.2, 78), "fsdp": (26_300, 4.8, 62), "vllm": (41_200, 5.6, 58)}


def peaks() -> float:
    """The peak memory of a rank, in GB; it is run on each of them, by its name."""
    return workload.peak_device_gb()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The steps of one of our set-ups, on the ranks of this torchrun job."""
    import torch

    import verl

    torch.set_num_threads(args.threads)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    actor = verl.Actor.from_pretrained(
        args.model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[args.dtype],
        optim={"lr": workload.LEARNING_RATE},
        strategy="fsdp",
        micro_batch_size=args.micro_batch,
        rollout="vllm" if args.setup == "vllm" else "embedded",
        kv_cache_gb=0.5 if where == "cpu" else None,
        sampling={"max_new_tokens": workload.NEW_TOKENS, "ignore_eos": True},
        placement=f"{where}:0-{int(os.environ['WORLD_SIZE']) - 1}",
    )
    trainer = verl.Trainer(
        actor,
        reward_fn=lambda texts: [workload.reward(text) for text in texts],
        algorithm="grpo",
        n=workload.SAMPLES,
        log_dir=False,
    )
    if args.setup == "vllm":
        trainer.enable_3d_hybrid_engine()
    prompts = workload.prompts(actor.tokenizer)
    logs = [trainer.step(prompts) for _ in range(1 + args.steps)][1:]
    if any(log["rollout/tokens"] != workload.PROMPTS * workload.SAMPLES * workload.NEW_TOKENS for log in logs):
        raise SystemExit("not every completion has its full length: this is not the agreed work")
    return {
        "rollout_seconds": statistics.median(log["time/rollout"] for log in logs),
        "training_seconds": statistics.median(log["time/update"] for log in logs),
        "step_seconds": statistics.median(log["time/step"] for log in logs),
        "peak_gb": max(verl.everywhere(peaks)),
    }


def run(args: argparse.Namespace, setup: str, micro_batch: int) -> dict[str, Any] | None:
    """One set-up in processes of its own; None: what it needs is not here."""
    python = args.vllm_python if setup == "vllm" else sys.executable
    needs = {"plain": "deepspeed", "vllm": "vllm"}.get(setup, "verl")
    if not Path(python).exists() or subprocess.run([python, "-c", f"import {needs}"], capture_output=True).returncode:
        print(f"{SETUPS[setup]} DID NOT RUN: {python} has no {needs}", flush=True)
        return None
    script = ["plain_step.py"] if setup == "plain" else ["three_setups.py", "--setup", setup]
    options = ("--dtype", args.dtype, "--steps", str(args.steps), "--threads", str(args.threads), "--model", args.model)
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    command = [
        *launcher,
        str(ROOT / "benchmarks" / script[0]),
        *script[1:],
        *options,
        "--micro-batch",
        str(micro_batch),
    ]
    environment = workload.environment(python, OMP_NUM_THREADS=str(args.threads))
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rollout_seconds"')]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    samples = workload.PROMPTS * workload.SAMPLES
    result["tokens_per_s"] = samples * workload.NEW_TOKENS / result["rollout_seconds"]
    result["samples_per_s"] = samples / result["training_seconds"]
    print(
        f"{SETUPS[setup]:28} micro-batch {micro_batch:3}: rollout {result['tokens_per_s']:8.0f} tokens/s, training "
        f"{result['samples_per_s']:6.2f} samples/s, peak {result['peak_gb']:6.2f} GB, "
        f"step {result['step_seconds']:6.2f} s",
        flush=True,
    )
    return result


def main() -> None:
    """Run the set-ups one after the other, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=[*SETUPS])
    parser.add_argument("--setup", choices=SETUPS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help="default: the GPUs of this machine, or 1")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="default: bf16 where the device has it")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16], help="that the first set-up tries")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that warms up")
    parser.add_argument("--threads", type=int, help="of each rank; default: its share of the cores")
    parser.add_argument("--model", default=str(workload.MODEL))
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), help="see `make vllm`")
    args = parser.parse_args()
    if args.setup:
        print(json.dumps(measure(args)))
        return
    import torch

    gpus = torch.cuda.device_count()
    args.ranks = args.ranks or gpus or 1
    args.threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
    args.dtype = args.dtype or ("bf16" if gpus or torch.cpu._is_avx512_bf16_supported() else "fp32")
    best: dict[str, dict[str, Any]] = {}
    for setup in args.setups:
        found = (run(args, setup, size) for size in (args.micro_batches if setup == "plain" else [args.micro_batch]))
        results = [result for result in found if result is not None]
        if results:
            best[setup] = min(results, key=lambda result: float(result["step_seconds"]))
    for setup, result in best.items():
        tokens, samples, memory = ARTICLE[setup]
        if "plain" in best:
            ratio = best["plain"]["step_seconds"] / result["step_seconds"]
            print(
                f"{SETUPS[setup]:28} {ratio:5.2f} times as fast (article, 4 x A100: {tokens:,}, {samples}, {memory} GB)"
            )


if __name__ == "__main__":
    main()
