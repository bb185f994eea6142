"""A run whose memory is looked at on the rank that goes on with the script: `rank_memory.py MODEL OUT STRATEGY`."""

import json
import sys

import verl
from verl.utils.memory import memory_by_role

model, out, strategy = sys.argv[1:]
actor = verl.Actor(model, strategy=strategy, optim={"lr": 1e-3}, sampling={"max_new_tokens": 2, "ignore_eos": True})
trainer = verl.Trainer(
    actor, reward_fn=lambda texts: [float(len(t)) for t in texts], algorithm="grpo", n=4, log_dir=False
)
before = memory_by_role({"actor": actor})
trainer.step(["a", "b"])
found = memory_by_role({"actor": actor, "trainer": trainer})
with open(out, "w") as file:
    json.dump([before, found], file)
