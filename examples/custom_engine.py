"""A rollout engine of your own, by path: `rollout.name=examples/custom_engine.py:OneByOne`, or in a script as below.

An engine is any class with these methods (`RolloutEngine` in verl/rollout/base.py says what each promises); `sleep` and
`wake` are inherited and do nothing. This one answers a request a step by transformers' `generate`, on the live model.
"""

import sys
from collections import deque

import torch

import verl
from verl.rollout.base import RolloutEngine, Sample


class OneByOne(RolloutEngine):
    def __init__(self, packed, tokenizer, eos_token_ids, options):
        self.model, self.ends = packed.model, list(eos_token_ids)
        self.queue, self.aborted, self.policy_version = deque(), set(), 0

    @property
    def unfinished(self):
        return len(self.queue)

    def add(self, request):
        self.queue.append(request)

    def step(self):
        if not self.queue:
            return []
        request = self.queue.popleft()
        if request.id in self.aborted:
            return [Sample(request.id, [], [], "abort", self.policy_version)]
        prompt, sampling = torch.tensor([list(request.prompt_tokens)]), request.params
        settings = {"max_new_tokens": sampling.max_new_tokens, "eos_token_id": self.ends, "pad_token_id": self.ends[0]}
        settings |= {"do_sample": sampling.temperature > 0, "temperature": sampling.temperature or 1.0}
        result = self.model.generate(prompt, **settings, return_dict_in_generate=True, output_logits=True)
        tokens = result.sequences[0, prompt.shape[1] :]
        logits = torch.stack(result.logits, 1)[0].float() / (sampling.temperature or 1.0)
        log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        finish = "stop" if int(tokens[-1]) in self.ends else "length"
        return [Sample(request.id, tokens.tolist(), log_probs.tolist(), finish, self.policy_version)]

    def abort(self, ids):
        self.aborted |= set(ids)

    def load_shards(self, shards, version):
        self.policy_version = version  # an engine with a copy of the weights takes them from `shards` here


if __name__ == "__main__":
    actor = verl.Actor.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "gpt2", rollout=OneByOne)
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [float(len(set(text.split()))) for text in texts], n=4)
    for _ in range(3):
        print(trainer.step(["Once upon a time"])["reward"])
