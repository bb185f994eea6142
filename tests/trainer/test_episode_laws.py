"""The laws of episodes (docs/agent_semantics.md), from sampling to the gradient of every weight, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import verl
from verl.rollout.episode import Turns
from verl.training.gradients import Gradients

READ = [5, 6, 7]
PROMPTS = [{"prompt": "Hello there"}, {"prompt": "What is it?"}]


class Two:
    """Two turns: as one trajectory; cut in two between them; or beside a branch of which nothing is trained."""

    gives_reward = True

    def __init__(self, form: str) -> None:
        self.form = form

    async def __call__(self, client: Any, row: Mapping[str, Any]) -> list[Turns]:
        prompt = [*row["prompt_tokens"]]
        one = await client.generate(prompt)
        later = [*prompt, *one.tokens, *READ]
        two = await client.generate(later)
        first = last = Turns()
        first.wrote(one)
        if self.form == "split":
            last = Turns(prompt_tokens=later)
        else:
            first.read(READ)
        last.wrote(two)
        last.reward = (sum(one.tokens) + 3 * sum(two.tokens)) % 7 / 3
        branch = Turns(prompt_tokens=[*prompt, 9])
        branch.read([4, 5, 6])
        return [branch, last] if self.form == "branch" else [first, last] if self.form == "split" else [last]


def gradients(model: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Of each optimizer step of two."""
    real, steps = Gradients.norm, list[dict[str, Tensor]]()

    def norm(self: Gradients, *arguments: Any) -> float:
        steps.append({weight.name: weight.gradient.clone() for weight in self.weights if weight.gradient is not None})
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "norm", norm)
        options: Any = {"dtype": "float64", "sampling": {"max_new_tokens": 6}, "epochs": 2}
        actor = verl.Actor(str(model), episode=Two(form), **options)
        verl.Trainer(actor, algorithm="grpo", n=4, log_dir=False).step(PROMPTS)
    assert len(steps) == 2
    return steps


def exact_norm(self: Any, hidden: Tensor) -> Tensor:
    return self.weight * (hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_cut_and_a_branch_change_no_gradient(
    kind: str, make_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of our own way is fp64. Transformers' own norm of Llama and its kin is fp32 in any model, and so rounds what
    differs in its last bit by 1e-8; with an exact one the law holds there, too."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    model = make_tiny(kind, torch.float64)
    whole, split, branch = (gradients(model, form, monkeypatch) for form in ("whole", "split", "branch"))
    for other in (split, branch):
        for ours, theirs in zip(whole, other, strict=True):
            assert ours.keys() == theirs.keys() and max(float(g.abs().max()) for g in ours.values()) > 1e-3
            for name, gradient in ours.items():
                torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-12)
