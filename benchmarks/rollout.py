"""Time generation on the same prompts: ours, vLLM's, transformers' `generate`. One line of JSON an engine, then ratios.

    .venv/bin/python benchmarks/rollout.py                              # 32 prompts x 8 samples x 128 tokens
    .venv/bin/python benchmarks/rollout.py --sizes large small long --engines embedded vllm --rounds 3
    .venv/bin/python benchmarks/rollout.py --natural --repeats 3        # responses end where they end: useful tokens
    .venv/bin/python benchmarks/rollout.py --prompts 4 --prompt-tokens 83 --new-tokens 64 --engines embedded

Sizes: `large` is 256 sequences of 94 + 128 tokens, `small` 32 of them, `long` 32 of 1,792 + 256 tokens. Engines take
turns in each of `--rounds`, and the ratios are of medians over the rounds.

`ceiling_tokens_per_second` of the embedded engine is what this machine's matrix products alone would allow
(`ceiling.py`: those of its own forwards, timed by torch alone after each rollout); `share_of_ceiling` is what of it is
reached, by a peer too, in the last line of a size.

Temperature 1 over the whole vocabulary, in the dtype that `dtype: auto` means here. Each engine runs in a process of
its own, one after the other, at its best: Intel's OpenMP and tcmalloc are preloaded for all (`peer_env.sh preload`;
`--no-preload` leaves them out), vLLM (`make vllm`) gets blocks of 32 tokens so that samples share their prompt,
`generate` takes the best of batches of 32 to 256. Without `--natural` the prompts are random tokens and every response
has its full length; with it they are chats, and what a batch computes behind the end of a response does not count.
`peak_memory_gb` is the process's; on an accelerator (`--device cuda`) what torch took of it. `cpu_seconds` far below
`threads * seconds`: other programs had the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import workload
from ceiling import Ceiling, Forwards

os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("embedded", "vllm", "generate", "hf")
BATCHES = (32, 64, 128, 256)
SIZES = {
    "large": {"prompts": 32, "prompt_tokens": 94, "samples": 8, "new_tokens": 128},
    "small": {"prompts": 4, "prompt_tokens": 94, "samples": 8, "new_tokens": 128},
    "long": {"prompts": 4, "prompt_tokens": 1792, "samples": 8, "new_tokens": 256},
}
_STORY = (
    "In a town by the sea there are {a} fishing boats. On the first day {b} of them sail out before sunrise, and each "
    "brings home {c} baskets of herring and {d} baskets of cod. The harbour master buys a third of the herring for the "
    "market, and the rest is shared among the {e} families of the crews. A story teller sits on the quay and counts "
    "everything twice. Explain in your own words, step by step, what happens in the town on that day and how many "
    "baskets the families get."
)


def prompts(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Random tokens, lengths within a tenth of `--prompt-tokens`; with `--natural` chats as long as they are."""
    rng = random.Random(0)
    if args.natural:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stories = [_STORY.format(**{name: rng.randint(3, 99) for name in "abcde"}) for _ in range(args.prompts)]
        chats = [[{"role": "user", "content": story}] for story in stories]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    spread = args.prompt_tokens // 10
    lengths = [args.prompt_tokens + rng.randint(-spread, spread) for _ in range(args.prompts)]
    return [[rng.randrange(100, vocabulary) for _ in range(length)] for length in lengths]


def engine_run(args: argparse.Namespace, model: Any) -> tuple[Callable[[], int], Callable[[], dict[str, float]]]:
    """One rollout by an engine of ours, and its counts."""
    from verl.models.loading import eos_token_ids
    from verl.models.packed import PackedModel
    from verl.rollout.base import Request, SamplingParams, generate
    from verl.rollout.embedded.engine import EmbeddedEngine
    from verl.rollout.hf import HFEngine

    eos = eos_token_ids(model)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=not args.natural)
    texts = prompts(args, model.config.vocab_size)
    requests = [Request(f"{i}/{j}", text, params) for i, text in enumerate(texts) for j in range(args.samples)]
    if args.engine == "hf":
        hf = HFEngine(model, eos_token_ids=eos, seed=0, max_batch=args.batch)
        return lambda: sum(len(sample.tokens) for sample in generate(hf, requests)), dict
    memory = int(args.kv_cache_gb * 2**30)
    engine = EmbeddedEngine(PackedModel(model), eos_token_ids=eos, seed=0, max_batch=args.batch, kv_memory=memory)

    def run() -> int:
        engine.load_shards((), engine.policy_version + 1)  # as after an update: no prompt is known
        engine.scheduler.steps = engine.scheduler.preemptions = 0
        return sum(len(sample.tokens) for sample in generate(engine, requests))

    def split() -> dict[str, float]:
        return {"steps": engine.scheduler.steps, "preemptions": engine.scheduler.preemptions}

    return run, split


def generate_run(args: argparse.Namespace, model: Any) -> tuple[Callable[[], int], Callable[[], dict[str, Any]]]:
    """One rollout by `model.generate` over left-padded batches."""
    import torch

    texts = [text for text in prompts(args, model.config.vocab_size) for _ in range(args.samples)]
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends])

    def run() -> int:
        count = 0
        for start in range(0, len(texts), args.batch):
            batch = texts[start : start + args.batch]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(text)) + text for text in batch], device=args.device)
            mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in batch], device=args.device)
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=None if args.natural else args.new_tokens,
                max_new_tokens=args.new_tokens,
                pad_token_id=0,
            )[:, longest:].cpu()
            # A row counts up to its first end, that included.
            ended = torch.isin(out, ends).int().cumsum(-1)
            useful = torch.cat([torch.ones(len(out), 1, dtype=torch.bool), ended[:, :-1] == 0], 1)
            count += int(useful.sum()) if args.natural else out.numel()
        return count

    return run, lambda: {"batch": args.batch}


def vllm_run(args: argparse.Namespace) -> tuple[Callable[[], int], Callable[[], dict[str, Any]]]:
    """One rollout by vLLM, in process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    # On a GPU its defaults: CUDA graphs, and the block size that its attention likes best.
    best = {"enforce_eager": True, "block_size": 32} if args.device == "cpu" else {}
    llm = LLM(
        args.model,
        dtype=args.dtype,
        **best,
        max_num_seqs=args.batch,
        max_model_len=max(2048, args.prompt_tokens * 11 // 10 + args.new_tokens),
        kv_cache_memory_bytes=int(args.kv_cache_gb * 2**30),
    )
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    texts = [TokensPrompt(prompt_token_ids=text) for text in prompts(args, vocabulary)]
    # Log-probs of the samples are part of a rollout; ours has them too.
    params = SamplingParams(
        n=args.samples, temperature=1.0, max_tokens=args.new_tokens, ignore_eos=not args.natural, logprobs=0
    )

    def run() -> int:
        llm.reset_prefix_cache()
        answers = llm.generate(texts, params, use_tqdm=False)
        return sum(len(response.token_ids) for answer in answers for response in answer.outputs)

    def split() -> dict[str, Any]:
        import vllm

        return {"vllm": vllm.__version__}

    return run, split


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load the model, warm up on one prompt, then time the rollouts: medians."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    warm_up = argparse.Namespace(**{**vars(args), "prompts": 1, "new_tokens": 4})
    if args.engine == "vllm":
        weights = workload.peak_memory_gb(args.device)
        run, split = vllm_run(args)
        run()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device).eval()
        weights = workload.peak_memory_gb(args.device)
        make = generate_run if args.engine == "generate" else engine_run
        make(warm_up, model)[0]()
        run, split = make(args, model)
    seconds, cpu, tokens, products = [], [], [], []
    with ExitStack() as stack:
        seen = stack.enter_context(Forwards.recorded()) if args.engine == "embedded" else None
        if seen is not None:
            ceiling = stack.enter_context(Ceiling(args.model, args.dtype, args.threads, args.device))
        for _ in range(args.repeats):
            start, start_cpu = time.perf_counter(), time.process_time()
            tokens.append(run())  # host integers: nothing is under way on the device any more
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
            if seen is not None:
                products.append(ceiling.seconds(seen.rollout))
                seen.clear()
    expected = args.prompts * args.samples * args.new_tokens
    if not args.natural and set(tokens) != {expected}:
        raise SystemExit(f"{args.engine} gave {tokens} tokens instead of {expected}: this is not the agreed work")
    speed = statistics.median(n / t for n, t in zip(tokens, seconds, strict=True))
    peak, limit = workload.peak_memory_gb(args.device), {}
    if products:
        limit = {
            "ceiling_tokens_per_second": round(
                statistics.median(n / t for n, t in zip(tokens, products, strict=True)), 1
            ),
            "share_of_ceiling": round(statistics.median(p / t for p, t in zip(products, seconds, strict=True)), 3),
        }
    return {
        "engine": args.engine,
        "tokens_per_second": round(speed, 1),
        **limit,
        "tokens": round(statistics.median(tokens)),
        "seconds": round(statistics.median(seconds), 3),
        "cpu_seconds": round(statistics.median(cpu), 3),
        **split(),
        "peak_memory_gb": round(peak, 3),
        "memory_before_gb": round(weights, 3),
        "device": args.device,
        "threads": args.threads,
        "dtype": args.dtype,
        "workload": f"{args.prompts} x ~{args.prompt_tokens} x {args.samples} x {args.new_tokens}"
        + (", natural stops" if args.natural else ""),
        "preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def vllm_python(args: argparse.Namespace) -> str:
    """The interpreter that runs vLLM."""
    here = importlib.util.find_spec("vllm") is not None
    return args.vllm_python or (sys.executable if here else str(ROOT / ".venv-vllm" / "bin" / "python"))


def measured(args: argparse.Namespace, engine: str, batch: int, seconds: float | None = None) -> dict[str, Any]:
    """The result of one engine, from a process of its own.

    Args:
        args: of `parsed`, with a size.
        seconds: that it may take.

    Raises:
        SystemExit: it failed.
        subprocess.TimeoutExpired: it took longer.
    """
    python = vllm_python(args) if engine == "vllm" else sys.executable
    job = json.dumps(vars(args) | {"engine": engine, "batch": batch})
    more = {"OMP_NUM_THREADS": str(args.threads)}
    if args.device == "cpu" and not args.no_preload:
        preload = subprocess.run([ROOT / "benchmarks" / "peer_env.sh", "preload"], stdout=subprocess.PIPE, text=True)
        more["LD_PRELOAD"] = preload.stdout.strip()
    environment = workload.environment(python, **more)
    done = workload.call([python, __file__, "--job", job], environment, seconds)
    if done.returncode:
        raise SystemExit(f"{engine} failed")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(args: argparse.Namespace) -> None:
    """Measure the engines on one size in turn; print each result, and the ratios."""
    speeds: dict[str, dict[int, list[float]]] = {}
    limits = []
    for _ in range(args.rounds):
        for engine in args.engines:
            for batch in [args.batch] if args.batch else BATCHES if engine == "generate" else [256]:
                result = measured(args, engine, batch)
                print(json.dumps(result), flush=True)
                speeds.setdefault(engine, {}).setdefault(batch, []).append(result["tokens_per_second"])
                limits += [result["ceiling_tokens_per_second"]] if engine == "embedded" else []
    best = {engine: max(map(statistics.median, tried.values())) for engine, tried in speeds.items()}
    if "embedded" in best:
        limit = statistics.median(limits)
        ratios: dict[str, Any] = {f"embedded / {name}": round(best["embedded"] / best[name], 2) for name in best}
        print(json.dumps(ratios | {"share_of_ceiling": {name: round(best[name] / limit, 3) for name in best}}))


def sized(args: argparse.Namespace, size: str) -> argparse.Namespace:
    """With the numbers of this size where the command line has none."""
    return argparse.Namespace(**vars(args) | {name: getattr(args, name) or n for name, n in SIZES[size].items()})


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["embedded", "vllm", "generate"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["large"])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--model", default=str(workload.MODEL))
    parser.add_argument("--device", default="cpu", help="such as cuda; nothing is preloaded then")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--prompts", type=int, help="instead of those of the size, as are the next three")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--samples", type=int, help="of each prompt")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--natural", action="store_true", help="chats whose answers end where they end")
    parser.add_argument("--batch", type=int, help="responses at a time (256; generate: the best of 32 to 256)")
    parser.add_argument("--kv-cache-gb", type=float, default=2.0, help="of the embedded engine and vLLM")
    parser.add_argument("--repeats", type=int, default=1, help="timed rollouts of a process; their median is reported")
    parser.add_argument("--rounds", type=int, default=1, help="turns of every engine, in processes of their own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-preload", action="store_true", help="without Intel's OpenMP and tcmalloc")
    parser.add_argument("--vllm-python", help="one that has vLLM (this one, else that of `make vllm`)")
    return parser.parse_args(words)


def main() -> None:
    """Measure one engine here, or each of several in a process of its own."""
    args = parsed()
    if args.job:
        from verl.models.loading import resolved_dtype

        args = argparse.Namespace(**json.loads(args.job))
        args.dtype = resolved_dtype(args.model, args.dtype) or args.dtype
        print(json.dumps(measure(args)))
        return
    if "vllm" in args.engines and not Path(vllm_python(args)).exists():
        args.engines.remove("vllm")
        print("without vLLM: neither this environment nor .venv-vllm has it", flush=True)
    for size in args.sizes:
        compare(sized(args, size))


if __name__ == "__main__":
    main()
