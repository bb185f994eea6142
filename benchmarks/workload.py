"""The work of the GRPO-step benchmark, the same for every contender: four prompts, eight samples each.

A contender takes one optimizer step on `prompts * samples` completions of exactly `new_tokens` tokens,
sampled at temperature 1 from the whole vocabulary. This module needs nothing but a tokenizer, so that it
can be imported in any contender's environment.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
SAMPLES = 8
NEW_TOKENS = 64
LEARNING_RATE = 1e-6

# The most tokens that each prompt may have; whole words are dropped until it fits.
_TOKENS = (82, 83, 83, 84)
PROMPTS = len(_TOKENS)
_OPENINGS = (
    "A baker has four trays of bread rolls and each tray holds nine rolls.",
    "The school library lends every pupil three books at a time for two weeks.",
    "On Monday morning the harbour master counts all the boats at the pier.",
    "Two friends walk from their village to the market town across the hills.",
)
_STORY = (
    "Before noon some of them are gone, and nobody has written down how many were there at first. "
    "An old man says that he saw twelve, his neighbour is sure that it was half as many again, and a "
    "child who stood close by has kept a careful list on the back of an envelope since the early morning. "
    "Tell the story to its end, and explain step by step how the right number can be found."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the work, and what every contender is told."""
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each completion")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--device", default="cpu", help="such as cuda")


def prompts(tokenizer: Any, count: int = PROMPTS) -> list[str]:
    """Different texts of 80 to 86 tokens each under `tokenizer`, to be encoded as they are.

    Raises:
        ValueError: the tokenizer cuts words into so many pieces that a text misses that range.
    """
    # Beyond the first four the openings come again, each time before another case.
    whole = [f"Case {i}. {texts()[i % PROMPTS]}" if i >= PROMPTS else texts()[i] for i in range(count)]
    cut = [_cut(tokenizer, text, _TOKENS[i % PROMPTS]) for i, text in enumerate(whole)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in cut]
    if not all(80 <= length <= 86 for length in lengths):
        raise ValueError(f"prompts of {lengths} tokens: this tokenizer does not fit the benchmark's texts")
    return cut


def texts() -> list[str]:
    """The prompts before they are cut."""
    return [f"{opening} {_STORY}" for opening in _OPENINGS]


def _cut(tokenizer: Any, text: str, most: int) -> str:
    words = text.split(" ")
    while len(tokenizer(" ".join(words))["input_ids"]) > most:
        words.pop()
    return " ".join(words)


def reward(completion: str) -> float:
    """How often the letter e occurs, and a part below 1 that no other text has: free of charge, and different from
    sample to sample, so that every row has a gradient."""
    return completion.count("e") + zlib.crc32(completion.encode()) / 2**32


def call(
    command: Sequence[str], environment: Mapping[str, str], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and read what it prints; its standard error is shown as it comes.

    Raises:
        subprocess.TimeoutExpired: it took longer than `seconds`; all that it started has been killed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, printed)


def environment(python: str = sys.executable, **more: str) -> dict[str, str]:
    """Of a process that imports the package from this tree.

    Args:
        python: the interpreter; what this one finds beside its own packages is not for another.
        more: further variables.
    """
    root = str(Path(__file__).resolve().parent.parent)
    found = os.environ.get("PYTHONPATH") if python == sys.executable else None
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [found])]), **more}


def peak_memory_gb(device: str = "cpu") -> float:
    """The most this process has held, in 10**9 bytes: of a CPU the largest resident set, of an accelerator what torch
    took of it."""
    if device != "cpu":
        import torch

        return torch.get_device_module(device).max_memory_reserved() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_device_gb() -> float:
    """What this rank takes of its device in 10**9 bytes: of a GPU what is in use now; on a CPU the largest resident set
    that this process and those it started have had, pages that they share counted for each."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9
    return sum(map(_resident_peak, [os.getpid(), *_started(os.getpid())])) / 1e9


def _started(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in _started(child))]


def _resident_peak(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
