"""What the driver says of settings before it starts anything: it is rank 0 of a job of which no other rank is there.

python rank_refused.py CASES, as JSON: name -> the arguments of `verl.Actor`, and `model`, the kind of a tiny one.
Prints one line of JSON a case: its name, and why it was refused or null.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BloomConfig

import verl
from tests.conftest import IDS, byte_tokenizer
from tests.roles.test_cells import MODELS
from verl.errors import ConfigError

KINDS: dict[str, Any] = {**MODELS, "bloom": lambda: BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=4)}


def outcome(case: dict[str, Any]) -> str | None:
    """Why an actor's workers cannot be made, if they cannot."""
    given = dict(case)
    live = AutoModelForCausalLM.from_config(KINDS[given.pop("model")](), dtype=getattr(torch, given.pop("dtype")))
    if given.pop("freezes", None):
        live.get_input_embeddings().requires_grad_(False)
    if given.pop("freezes_all", None):
        live.requires_grad_(False)
    if given.pop("no_checkpointing", None):
        type(live).supports_gradient_checkpointing = False
    optim = given.pop("optim", {"lr": 1e-3})
    if optim == "live":
        optim = torch.optim.SGD(live.parameters(), lr=1e-3)
    elif optim == "made":
        optim = torch.optim.SGD
    try:
        actor = verl.Actor(live, byte_tokenizer(), optim=optim, **given)
        if actor.head == "lm":
            actor.group  # noqa: B018
        else:
            actor.generate_sequences(["a"])
    except ConfigError as error:
        return str(error)
    finally:
        type(live).supports_gradient_checkpointing = True
    assert not actor.controller.transport.has_started
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, one_case in json.loads(sys.argv[1]).items():
        sys.stdout.write(json.dumps({"case": name, "refused": outcome(one_case)}) + "\n")
        sys.stdout.flush()
