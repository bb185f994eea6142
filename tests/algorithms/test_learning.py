"""Every algorithm reaches its own objective on a problem small enough to be exact about: a table of logits.
Where an algorithm puts a text before prompts, each text has a table of its own.

A prompt has a target token at each of three places. Online algorithms draw responses and are rewarded for hits;
offline ones see responses of which the better has more hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.support import OFFLINE, ONLINE, loss_input
from verl.algorithms import make_algorithm
from verl.algorithms.base import BaseAlgorithm
from verl.batch import Batch

PROMPTS, PLACES, VOCABULARY, PREFIXES = 4, 3, 5, 5
TARGETS = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1], [4, 2, 3]])


class Table(torch.nn.Module):
    """Logits of each prompt and place, and critics' values of them."""

    def __init__(self, algorithm: BaseAlgorithm | None = None) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.prefixes: dict[str | None, int] = {}
        self.tables = torch.nn.Parameter(torch.zeros(PREFIXES, PROMPTS, PLACES, VOCABULARY, dtype=torch.float64))
        self.critics = torch.nn.ParameterDict(
            {
                role: torch.nn.Parameter(torch.zeros(PROMPTS, PLACES, dtype=torch.float64))
                for role in ("critic", "cost_critic")
            }
        )

    def logits(self, batch: Batch) -> Tensor:
        texts = self.algorithm and self.algorithm.prompt_prefixes(batch)
        rows = [self.prefixes.setdefault(text, len(self.prefixes)) for text in texts or [None] * len(batch)]
        return self.tables[torch.tensor(rows, dtype=torch.int64), prompts_of(batch)]

    def log_probs(self, batch: Batch) -> Tensor:
        tokens = torch.tensor(batch["response_tokens"])
        return self.logits(batch).log_softmax(-1).gather(2, tokens[..., None]).flatten()

    def values(self, batch: Batch, role: str) -> Tensor:
        return self.critics[role][prompts_of(batch)].flatten()


def prompts_of(batch: Batch) -> Tensor:
    return torch.tensor(batch["prompt_tokens"]).flatten()


def hits(batch: Batch) -> Tensor:
    return (torch.tensor(batch["response_tokens"]) == TARGETS[prompts_of(batch)]).double().mean(1)


def with_log_probs(batch: Batch, **columns: Tensor) -> Batch:
    lengths = [PLACES] * len(batch)
    return batch.add({name: (values.detach(), lengths) for name, values in columns.items()})


def rollout(table: Table, n: int, greedy: bool) -> Batch:
    prompts = torch.arange(PROMPTS).repeat_interleave(n)
    logits = table.logits(Batch.from_columns({"prompt_tokens": prompts[:, None].tolist()})).detach()
    tokens = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).view(-1, PLACES)
    flags = [False] * len(prompts)
    if greedy:
        prompts = torch.cat([prompts, torch.arange(PROMPTS)])
        tokens = torch.cat([tokens, logits[::n].argmax(-1)])
        flags += [True] * PROMPTS
    batch = Batch.from_columns(
        {
            "group": [f"p{p}" for p in prompts.tolist()],
            "prompt_tokens": prompts[:, None].tolist(),
            "response_tokens": tokens.tolist(),
            **({"baseline": flags} if greedy else {}),
        }
    )
    return with_log_probs(batch, rollout_log_probs=table.log_probs(batch))


def train_online(name: str, lr: float, steps: int = 40, **options: Any) -> tuple[list[float], list[float]]:
    """Mean reward and mean cost (share of the last place's hits) of every step."""
    torch.manual_seed(0)
    algorithm = make_algorithm(name, **options)
    table, reference = Table(algorithm), Table()
    optimizer = torch.optim.Adam(table.parameters(), lr=lr)
    rewards, costs = [], []
    for _ in range(steps):
        batch = rollout(table, 8, algorithm.greedy_baseline)
        cost = (torch.tensor(batch["response_tokens"]) == TARGETS[prompts_of(batch)])[:, -1].double()
        batch = batch.add({"reward": hits(batch), "cost": cost})
        if algorithm.needs_constraint:  # one hit at least
            batch = batch.add({"finish": ["stop" if hit > 0 else "reject" for hit in hits(batch).tolist()]})
        columns = {"ref_log_probs": reference.log_probs(batch)}
        if "reference" in algorithm.roles:  # a teacher that hits nine times in ten
            tokens = torch.tensor(batch["response_tokens"])
            right = tokens == TARGETS[prompts_of(batch)]
            columns["ref_log_probs"] = torch.where(right, 0.9, 0.1 / (VOCABULARY - 1)).double().log().flatten()
        columns |= {"values": table.values(batch, "critic"), "cost_values": table.values(batch, "cost_critic")}
        rewards.append(float(hits(batch).mean()))
        costs.append(float(cost.mean()))
        prepared, _ = algorithm.prepare(with_log_probs(batch, **columns))
        for _ in range(2):
            optimizer.zero_grad()
            for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
                objective = algorithm.objective(role)
                out = {"log_probs": table.log_probs(prepared)} if role == "actor" else {}
                out |= {} if role == "actor" else {"values": table.values(prepared, role)}
                objective.compute_loss(loss_input(objective, prepared, **out)).total.backward()
            optimizer.step()
    return rewards, costs


@pytest.mark.quick("grpo", "ppo")
@pytest.mark.parametrize("name", ONLINE)
def test_online_algorithms_raise_the_reward(name: str) -> None:
    options = {"cost_limit": 2.0} if name == "safe_rlhf" else {}  # a limit that never binds
    rewards, _ = train_online(name, 0.1, **options)
    idle, _ = train_online(name, 0.0, **options)
    assert sum(rewards[-4:]) / 4 > 0.5
    assert sum(idle[-4:]) / 4 < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"baseline": "critics"}], ids=["group", "critics"])
def test_safe_rlhf_keeps_the_cost_below_its_limit(options: dict[str, Any]) -> None:
    free_rewards, free_costs = train_online("safe_rlhf", 0.1, 120, lambda_init=0.0, lambda_lr=0.0, **options)
    rewards, costs = train_online("safe_rlhf", 0.1, 120, cost_limit=0.3, **options)
    tail = torch.tensor(costs[-24:])
    assert 0.1 < tail.mean() <= 0.3 + tail.std() / len(tail) ** 0.5
    assert sum(free_costs[-24:]) / 24 > 0.5
    assert sum(rewards[-24:]) / 24 > 0.5
    assert sum(free_rewards[-24:]) / 24 > sum(rewards[-24:]) / 24


def preferences(seed: int, pairs: int = 64) -> Batch:
    """Pairs of random responses of which the chosen has more hits."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    while len(rows) < 2 * pairs:
        prompt = int(torch.randint(PROMPTS, (1,), generator=g))
        two = torch.randint(VOCABULARY, (2, PLACES), generator=g)
        score = (two == TARGETS[prompt]).sum(1)
        if score[0] == score[1]:
            continue
        for response, own, other in ((0, score[0], score[1]), (1, score[1], score[0])):
            rows.append(
                {
                    "group": f"g{len(rows) // 2}",
                    "prompt_tokens": [prompt],
                    "response_tokens": two[response].tolist(),
                    "label": float(own > other),
                }
            )
    return Batch.from_rows(rows)


def accuracy(table: Table, algorithm: BaseAlgorithm) -> float:
    """Share of held-out pairs whose chosen response the model prefers."""
    held_out = preferences(99)
    scores = (
        scores_of(table, held_out) if algorithm.head == "score" else table.log_probs(held_out).view(-1, PLACES).sum(1)
    )
    label = held_out.tensor("label")
    return float((scores[label == 1] > scores[label == 0]).double().mean())


def scores_of(table: Table, batch: Batch) -> Tensor:
    tokens = torch.tensor(batch["response_tokens"])
    return table.logits(batch).gather(2, tokens[..., None]).sum((1, 2))


@pytest.mark.quick("dpo", "kto", "sft")
@pytest.mark.parametrize("name", OFFLINE)
def test_offline_algorithms_learn_the_preference(name: str) -> None:
    algorithm, table, reference = make_algorithm(name), Table(), Table()
    optimizer = torch.optim.Adam(table.parameters(), lr=0.05)
    models: dict[str, Callable[[Batch], Tensor]] = {"log_probs": table.log_probs, "ref_log_probs": reference.log_probs}
    before = accuracy(table, algorithm)
    for step in range(40):
        batch = preferences(step, 16)
        if name == "sft":
            batch = batch.filter([label == 1.0 for label in batch["label"]])
        batch = algorithm.extend(batch)
        batch = with_log_probs(batch, **{column: model(batch) for column, model in models.items()})
        prepared, _ = algorithm.prepare(batch)
        optimizer.zero_grad()
        score = algorithm.head == "score"
        outputs = {"scores": scores_of(table, prepared)} if score else {"log_probs": table.log_probs(prepared)}
        algorithm.compute_loss(loss_input(algorithm, prepared, **outputs)).total.backward()
        optimizer.step()
    assert before < 0.2  # all responses are equally likely: no strict preference
    assert accuracy(table, algorithm) > 0.9
