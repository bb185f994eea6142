"""The files of a directory that settings are shown in: models, data, and code of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from tests.conftest import IDS, byte_tokenizer, save_tiny
from tests.roles.test_cells import MODELS

USER = '''
import time
from pathlib import Path


def calls():
    """So far in this run, this one too."""
    with open("calls", "a") as file:
        file.write(".")
    return Path("calls").stat().st_size


def low(responses, prompts=None):
    return [sum(ord(c) < 100 for c in r) / max(len(r), 1) for r in responses]


def length(responses):
    return [float(len(r)) for r in responses]


def falling(responses, prompts):
    """A reward that rises, stays, and is low for four steps; there are two calls a step."""
    step = calls() // 2
    level = 0.2 if 14 <= step < 18 else min(0.6 + 0.175 * step, 2.0)
    return [level + 0.001 * (sum(map(ord, r)) % 7) for r in responses]


def sagging(responses, prompts):
    """A reward that rises slowly, and falls for four steps by less than it has risen."""
    step = (calls() - 1) // 2
    level = 1.2 if 14 <= step < 18 else 1.0 + 0.05 * step
    return [level + 0.001 * (sum(map(ord, r)) % 7) for r in responses]


def dropping(responses, prompts):
    """1 at first, later 0."""
    return [float(calls() <= 3) for r in responses]


def same(responses, prompts):
    return [1.0 for r in responses]


def slow(responses):
    time.sleep(0.4)
    return length(responses)


def some(solution_str, extra_info=None):
    if "ee" in solution_str:
        raise ValueError("too many")
    return 1.0


def once(responses, seen=set()):
    """Fails the first time on any samples, so that halves of a batch that failed fail, too."""
    if (key := tuple(responses)) not in seen:
        seen.add(key)
        raise ValueError("the first time")
    return length(responses)


def infinite(responses, prompts):
    return [3e38 * (-1) ** i for i, r in enumerate(responses)]


def last(response, answer):
    return float(len(response))


def even(solution_str, extra_info=None):
    total = sum(map(ord, solution_str))
    if total % 4:
        raise ValueError("of an odd sum")
    return total % 7 / 7


def third(responses, prompts):
    """Each prompt's samples score alike, but in every third call."""
    late = calls() % 3 == 0
    return [float(i) if late else 1.0 for i, r in enumerate(responses)]


def half(responses, prompts):
    """The samples of one of two prompts score alike."""
    return [float(sum(map(ord, r)) % 7) if len(p) % 2 else 1.0 for r, p in zip(responses, prompts)]


def policy(module):
    return type(module).__name__ in ("Qwen2MLP", "Qwen2Attention")


def halved(samples):
    return [len(text) / 2 for text in samples["response"]]


def odd(text, row):
    return sum(map(ord, text)) % 2


def waiting(responses, prompts):
    time.sleep(4)
    return length(responses)


async def twice(client, row):
    from verl.rollout.turns import Turns

    turns = Turns()
    for _ in range(2):
        turns.wrote(await client.generate([*row["prompt_tokens"], *turns.response_tokens]))
        turns.read([40, 41])
    return [turns]


class Quiet:
    def reset(self, prompt, **row):
        return "?"
'''


OWN = """
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model


class OwnConfig(GPT2Config):
    model_type = "own"


class OwnModel(GPT2Model):
    config_class = OwnConfig


class OwnLM(GPT2LMHeadModel):
    config_class = OwnConfig
"""


#: A stand-in, as the library is optional: a file a project.
TRACKIO = """
from pathlib import Path


class Run:
    def log(self, *args, **options):
        pass

    def finish(self):
        pass


def init(*, project, **options):
    Path(project).write_text("")
    return Run()


def Table(*args, **options):
    pass
"""


def make_world(folder: Path) -> None:
    """Models and data that the settings name, beside the folders in which observers work."""
    # Llama's norms are in fp32 whatever its dtype: GPT-2's are not.
    save_tiny(folder / "tiny", "gpt2", torch.float64)
    save_tiny(folder / "other", "gpt2", torch.float64, seed=1)
    save_tiny(folder / "llama", "llama")
    save_tiny(folder / "wide", "wide")
    save_tiny(folder / "exact", "qwen2", torch.float64)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    tokens = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["e"], vocabulary["l"] = vocabulary["l"], vocabulary["e"]
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokens))
    polite = byte_tokenizer()
    polite.chat_template = "{{ greeting }}" + polite.chat_template
    polite.save_pretrained(folder / "greeting")
    torch.manual_seed(2)
    experts = AutoModelForCausalLM.from_config(MODELS["experts"](), dtype=torch.float64)
    experts.save_pretrained(folder / "experts")
    byte_tokenizer().save_pretrained(folder / "experts")
    for name in ("scorer", "scorer2"):
        sizes = GPT2Config(**IDS, n_embd=16, n_layer=1, n_head=2, n_positions=256, num_labels=1)
        scorer = AutoModelForSequenceClassification.from_config(sizes, dtype=torch.float64)
        torch.nn.init.normal_(scorer.score.weight)
        scorer.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    make_coded(folder / "coded")
    (folder / "user.py").write_text(USER)
    (folder / "trackio.py").write_text(TRACKIO)
    for name, count in (("train", 12), ("train2", 12), ("eval", 6)):
        rows = [{"prompt": f"{name}: tell me of {i}{' and more' * (i % 3)}", "question": f"What is {i}?"}
                for i in range(count)]  # fmt: skip
        write(folder / f"{name}.jsonl", rows)
    write(folder / "tasks.jsonl", [{"prompt": f"{i}.", "task": "ab"[i % 2]} for i in range(24)])
    write(folder / "tasks2.jsonl", [{"prompt": f"{i}.", "task": "cb"[i % 2]} for i in range(24)])
    chosen = [{"prompt": f"number {i}", "chosen": f"yes, {i}" * 3, "rejected": "no"} for i in range(12)]
    write(folder / "pairs.jsonl", chosen)


def make_coded(folder: Path) -> None:
    """A model whose code comes with it."""
    save_tiny(folder, "gpt2", torch.float64)
    (folder / "own.py").write_text(OWN)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
