"""A training step: sample, score, model outputs, prepare, update.

Everything that trains runs through these calls, on the groups of one batch of prompts (a group is the samples of one
prompt): `Trainer` and `verl train` draw the samples of each task and learn from them, `RLDataPipeline` does both on the
graph that its user wrote, and asynchronous training begins with groups that its workers have sampled.

What a step does is the nodes of a graph (`verl.dataflow.graph`), which users extend. Each call from `sample` on begins
the nodes of its part and returns at once: a node takes a group as soon as the group has the columns that the node
reads. So rollout, rewards and reference overlap, and a fast group is scored while a slow one is still being sampled.
`draw` and `learn` end with `whole`, which waits until every node that was begun is done with every group; that of
`draw` is the barrier before advantages, which are statistics of the whole batch.
"""

from __future__ import annotations

from verl.dataflow.groups import Groups
from verl.dataflow.result import Result


async def step(groups: Groups) -> Result:
    """`draw`, then `learn`, where nothing stands between them: no buffer, no samples that the algorithm rejects."""
    await draw(groups)
    return await learn(groups)


async def draw(groups: Groups) -> Result:
    """Samples with all that the algorithm reads of them."""
    sample(groups)  # prompts -> response_tokens, rollout_log_probs
    score(groups)  # -> reward
    add_model_outputs(groups)  # -> ref_log_probs, values
    return await groups.whole()


async def scored(groups: Groups) -> Result:
    """Rewards alone, of samples that wait for their step."""
    score(groups)
    return await groups.whole()


async def learn(groups: Groups) -> Result:
    """Advantages, and an update of every model."""
    prepare(groups)  # -> log_probs, advantages, returns, weights
    update(groups)  # -> loss, gradient, optimizer step
    return await groups.whole()


def sample(groups: Groups) -> Groups:
    """`n` responses to each prompt, by the actor's engine (`RolloutNode`). Where samples were recorded, or drawn by
    workers, the graph has no such node, and this begins nothing."""
    return groups.start("sample")


def score(groups: Groups) -> Groups:
    """The reward of each response (`RewardNode`), and users' own nodes that read or add columns of samples."""
    return groups.start("score")


def add_model_outputs(groups: Groups) -> Groups:
    """Log-probs under the reference, and values of the critics (`UpdateNode.experience`): one forward of each model
    over all rows, as soon as all are sampled. Rewards may still be waited for."""
    return groups.start("model outputs")


def prepare(groups: Groups) -> Groups:
    """Advantages and returns, by the algorithm's `prepare`; first the actor's log-probs, if the algorithm needs those
    of the policy before the update (`Updater.prepare`). Of several tasks each prepares its own samples."""
    return groups.start("prepare")


def update(groups: Groups) -> Groups:
    """One call for each model, of all its mini-batches and epochs (`Actor.train`, `Critic.train`), once `prepare` has
    made the columns that its loss reads. The engine that generates has the new weights when the actor's update ends."""
    return groups.start("update")
