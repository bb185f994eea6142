"""A model that the script made, trained on ranks that have parts of it, and read back; under torchrun.

python rank_live.py MODEL OUT SETTINGS, the last as JSON: name -> settings of training. OUT/NAME then has `export`,
`read` and `merged`: by `save_pretrained`, by `actor.model`, by `merged_shards`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, out, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    actors = {}
    for name, train in settings.items():  # all of them before the first call, after which rank 0 goes on alone
        live = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        lora = {"lora": {"r": 2}} if train.pop("lora", False) else {}
        tokenizer = AutoTokenizer.from_pretrained(model)
        actors[name] = verl.Actor(
            model=live, tokenizer=tokenizer, train=train, optim={"lr": 1e-2}, sampling={"max_new_tokens": 4}, **lora
        )
    for name, actor in actors.items():
        sequences = actor.generate_sequences(["Once upon a time", "And"], n=2, key="k")
        actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
        (out / name).mkdir(parents=True)
        actor.save_pretrained(str(out / name / "export"))
        torch.save(dict(actor.model.state_dict()), out / name / "read")
        torch.save({shard.name: shard.tensor.clone() for shard in actor.merged_shards()}, out / name / "merged")
        logits = actor.model(torch.tensor([[5, 6, 7]])).logits
        torch.save(logits.detach(), out / name / "logits")
