"""Adapters of several forms on ranks that share the model; a job of 2 ranks.

python rank_adapter_forms.py BASE; prints a line of JSON: by form, how far the reference is from what it was, and the
policy from it, after two updates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.roles.test_adapter_forms import ACCEPTED, PROMPTS, actor_of, adapted, column, gap, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    actors = {
        form: actor_of(adapted(Path(sys.argv[1]), ACCEPTED[form](), "float64"), strategy="fsdp")
        for form in ("bias=all", "modules_to_save=lm_head", "ia3")
    }
    for form, actor in actors.items():
        rows = actor.generate_sequences(PROMPTS, n=2, key="first")
        before = column(actor.compute_log_probs(rows), "log_probs")
        train(actor)
        reference = column(actor.compute_ref_log_probs(rows), "ref_log_probs")
        policy = column(actor.compute_log_probs(rows), "log_probs")
        found[form] = {"reference": gap(reference, before), "policy": gap(policy, before)}
    sys.stdout.write(json.dumps(found) + "\n")
