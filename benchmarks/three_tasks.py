"""Three tasks on one actor, whose rewards are services that take their time: together, and one run after another.

A reward takes `--ratio` times as long as the rollout and the update of its batch, which are measured first. Both do the
same work: `--steps` batches of each task. Three runs one after another wait for every reward; `InterleavedTrainer`
samples and trains the other tasks meanwhile, with samples at most two updates old and a correction for their age, which
takes a forward pass of its own; `Trainer(tasks=...)` has one update for all three in a step. With one processor for
rollout and update, the best that can be is 3 for a ratio of 2, and 1 where rewards take no time.

    python benchmarks/three_tasks.py [--steps 20] [--ratio 2] [--hidden 256]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import verl
from verl.data import get_dataloader

TASKS = ("digits", "letters", "spaces")
PROMPTS, SAMPLES, TOKENS, STALENESS = 4, 4, 32, 2
#: Scores the texts it gets after as many seconds as its argument says, any number of calls at a time.
SERVICE = """
import http.server, json, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(sys.argv[1]))
        body = json.dumps([sum(map(str.isdigit, text)) / (len(text) + 1) for text in given["responses"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Service:
    """A scoring service in a process of its own."""

    def __init__(self, latency: float) -> None:
        command = [sys.executable, "-c", SERVICE, str(latency)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}/score"

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def make_model(path: Path, hidden: int) -> str:
    """A random Llama with a tokenizer of single characters."""
    characters = [chr(code) for code in range(32, 127)]
    core = Tokenizer(models.WordLevel({"<end>": 0} | {c: i + 1 for i, c in enumerate(characters)}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>").save_pretrained(path)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=96, eos_token_id=0, bos_token_id=0, **sizes)).save_pretrained(path)
    return str(path)


def prompts(task: str) -> list[str]:
    return [f"Write {task}, number {number:03d}: " for number in range(64)]


def actor(path: str) -> verl.Actor:
    sampling = verl.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    return verl.Actor(path, optim={"lr": 1e-5}, sampling=sampling, max_num_seqs=PROMPTS * SAMPLES)


def alone(path: str, task: str, url: str, steps: int) -> tuple[float, float]:
    """Seconds of `steps` synchronous steps of one task, and of their rollouts and updates alone."""
    options = {"algorithm": "grpo", "rollout_is": "token", "n": SAMPLES, "log_dir": False}
    trainer = verl.Trainer(actor(path), reward=verl.Reward(url=url), **options)
    loader = get_dataloader({task: prompts(task)}, batch_size=PROMPTS).sources[task]
    try:
        trainer.step(loader.take(PROMPTS))
        seconds = busy = 0.0
        for _ in range(steps):
            record = trainer.step(loader.take(PROMPTS))
            seconds += record["time/step"]
            busy += record["time/rollout"] + record["time/update"]
    finally:
        trainer.close()
    return seconds, busy


def together(path: str, url: str, steps: int, staleness: int) -> dict[str, Any]:
    """The same number of batches of each of the three tasks at once: by `InterleavedTrainer`, or with a staleness of 0
    by `Trainer`."""
    tasks = [
        verl.Task(name, verl.algorithms.make_algorithm("grpo", rollout_is="token"), {"reward": verl.Reward(url=url)},
                  n=SAMPLES) for name in TASKS
    ]  # fmt: skip
    trainer: verl.Trainer = (
        verl.InterleavedTrainer(actor(path), tasks=tasks, max_staleness=staleness, log_dir=False)
        if staleness
        else verl.Trainer(actor(path), tasks=tasks, log_dir=False)
    )
    loader = get_dataloader({task: prompts(task) for task in TASKS}, batch_size=len(TASKS) * PROMPTS)
    samples = dict.fromkeys(TASKS, 0)
    oldest = busy = 0.0
    wanted = steps * PROMPTS * SAMPLES
    try:
        trainer.fit(loader, 1)
        began = time.perf_counter()
        while min(samples.values()) < wanted:
            record = trainer.advance(loader)
            for name in TASKS:
                samples[name] += int(record.get(f"task/{name}/samples", 0))
            oldest = max(oldest, record.get("rollout/staleness/max", 0.0))
            busy += record.get("busy/actor", 0.0) * record["time/step"]
        seconds = time.perf_counter() - began
    finally:
        trainer.close()
    return {
        "samples_per_s": sum(samples.values()) / seconds,
        "oldest_updates": oldest,
        "actor_busy": busy / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="batches of each task")
    parser.add_argument("--ratio", type=float, default=2.0, help="of a reward's time to that of rollout and update")
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), args.hidden)
        with Service(0.0) as service:
            _, busy = alone(path, TASKS[0], service.url, args.steps)
        latency = args.ratio * busy / args.steps
        with Service(latency) as service:
            each = [alone(path, task, service.url, args.steps)[0] for task in TASKS]
            mixed = together(path, service.url, args.steps, STALENESS)
            steady = together(path, service.url, args.steps, 0)
    rate = len(TASKS) * args.steps * PROMPTS * SAMPLES / sum(each)
    print(json.dumps({
        "rollout_and_update_s": round(busy / args.steps, 3),
        "reward_s": round(latency, 3),
        "one_after_another_samples_per_s": round(rate, 2),
        "together_samples_per_s": round(mixed["samples_per_s"], 2),
        "ratio": round(mixed["samples_per_s"] / rate, 3),
        "synchronous_ratio": round(steady["samples_per_s"] / rate, 3),
        "oldest_updates": mixed["oldest_updates"],
        "actor_busy": round(mixed["actor_busy"], 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
