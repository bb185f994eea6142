"""A training step: sample, score, model outputs, prepare, update.

Everything that trains runs through these calls, on the groups of one batch of prompts (a group is the samples of one
prompt): `Trainer` and `verl train` draw the samples of each task and learn from them, `RLDataPipeline` does both on the
graph that its user wrote, and asynchronous training begins with groups that its workers have sampled.

What a step does is the nodes of a graph (`verl.dataflow.graph`), which users extend; each call below begins the nodes
of its part and returns at once. A node takes a group as soon as the group has the columns that the node reads. So
rollout, rewards and reference overlap: a fast group is scored while a slow one is still being sampled. The barrier is
`whole`.
"""

from __future__ import annotations

from verl.dataflow.groups import Groups
from verl.dataflow.result import Result


async def step(groups: Groups) -> Result:
    """A whole step, where nothing stands between its halves: no buffer, no samples that the algorithm rejects."""
    await draw(groups)
    return await learn(groups)


async def draw(groups: Groups) -> Result:
    """Samples with all that the algorithm reads of them."""
    sample(groups)  # prompts -> response_tokens, rollout_log_probs
    score(groups)  # -> reward
    add_model_outputs(groups)  # -> ref_log_probs, values
    return await groups.whole()


async def learn(groups: Groups) -> Result:
    """Advantages, and an update of every model."""
    prepare(groups)  # -> log_probs, advantages, returns, weights
    update(groups)  # -> loss, gradient, optimizer step
    return await groups.whole()


def sample(groups: Groups) -> Groups:
    """`n` responses to each prompt, by the actor's engine (`RolloutNode`). Samples that were recorded, or that workers
    have drawn, are there already: their graph has no source."""
    return groups.start("sample")


def score(groups: Groups) -> Groups:
    """The reward of each response (`RewardNode`), and what users' own nodes do with samples."""
    return groups.start("score")


def add_model_outputs(groups: Groups) -> Groups:
    """Log-probs under the reference, and values of the critics (`UpdateNode.experience`): one forward of each model
    over all rows, while rewards are still waited for."""
    return groups.start("model outputs")


def prepare(groups: Groups) -> Groups:
    """What is a statistic of the whole batch: the algorithm's `prepare`, after the log-probs before the update where it
    needs them (`Updater.prepare`). Of several tasks each has its own."""
    return groups.start("prepare")


def update(groups: Groups) -> Groups:
    """Every model once: all its mini-batches and epochs (`Actor.train`, `Critic.train`). The engine that generates has
    the new weights when the actor's update ends."""
    return groups.start("update")
