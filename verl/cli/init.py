"""`verl init`: a recipe to start from."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl._base.schemas import SETTINGS
from verl.errors import ConfigError

#: Sums of two numbers up to 20: few and short, so that two CPU cores without bf16 learn them in minutes.
_LARGEST, _HELD_OUT = 20, 48

_RECIPE = """\
# GRPO teaches a small model to add. From this directory:
#
#   verl train recipe.yaml --dry-run             # every setting, and what would run
#   verl train recipe.yaml
#   verl train recipe.yaml trainer.total_steps=60 actor_rollout_ref.actor.optim.lr=1.0e-5
#   verl config                                  # all settings with their meaning

schema: {schema}                  # version of the form of this file

actor_rollout_ref:
  model:
    path: {model}
  actor:
    optim:
      lr: 2.0e-5
    max_tokens_per_micro_batch: 2048
  rollout:
    n: 8                     # samples of each prompt
    max_new_tokens: 16

algorithm:
  name: grpo

data:
  train: train.jsonl         # your own rows: a column `prompt`, and what the reward wants to know
  eval: held_out.jsonl
  system_prompt: Answer with the number alone.  # so prompts are chats, through the model's template
  batch_size: 8              # prompts a step

reward:
  path: rewards.py:correct

trainer:
  total_steps: 12
  save_every: 12
"""

_REWARDS = '''\
"""How good a response is."""

import re


def correct(responses, prompts, answer):
    """1 for a response whose last number is the row's `answer`. `None` would leave a sample out."""
    found = [re.findall(r"-?\\d+", response) for response in responses]
    return [float(bool(numbers) and numbers[-1] == str(a)) for numbers, a in zip(found, answer)]
'''


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model to train: a directory, or a name of the Hugging Face hub.")] = (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
) -> None:
    """Write a recipe to start from: settings, a reward, and data.

    [bold]Examples[/bold]
    $ verl init sums
    $ verl init sums --model models/SmolLM2-135M-Instruct
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there and is not an empty directory: name a new one")
    where = str(Path(model).resolve()) if Path(model).is_dir() else model
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "recipe.yaml").write_text(
        _RECIPE.format(schema=SETTINGS.current, model=json.dumps(where)), encoding="utf-8"
    )
    (directory / "rewards.py").write_text(_REWARDS, encoding="utf-8")
    pairs = [(a, b) for a in range(1, _LARGEST + 1) for b in range(1, _LARGEST + 1)]  # every sum once
    random.Random(0).shuffle(pairs)
    rows: list[dict[str, object]] = [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a, b in pairs]
    for name, part in (("train.jsonl", rows[_HELD_OUT:]), ("held_out.jsonl", rows[:_HELD_OUT])):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    # `verl` where a shell would find the one that runs now; else this Python with the module.
    script = shutil.which("verl")
    is_this = script is not None and Path(script).resolve() == Path(sys.argv[0]).resolve()
    verl = "verl" if is_this else f"{shlex.quote(sys.executable)} -m verl"
    names = ", ".join(sorted(path.name for path in directory.iterdir()))
    typer.echo(f"{directory}: {names}\nnext: cd {shlex.quote(str(directory))} && {verl} train recipe.yaml")
