"""`TrainEngine.update(parts)`: all losses of a step at once; and a second implementation, a pipeline of two stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.training.cases import (
    OPTIM,
    ROWS,
    gradients_of,
    make_engine,
    part,
    policy_loss,
    ragged_batch,
    tiny_model,
)
from verl.models.segments import pack_rows
from verl.training.engine import Metrics
from verl.training.loss import Loss, LossInput, LossPart, combine_metrics
from verl.training.mini_batch import MiniBatch

OTHER_ROWS = [(2, 3), (2, 6), (6, 1)]


def square_loss(x: LossInput) -> Loss:
    assert x.log_probs is not None
    return Loss(
        total=0.3 * (x.weights * (x.log_probs + 1).square()).sum(),
        metrics={"squares": x.num_sequences / x.total_sequences},
    )


def two_parts() -> list[LossPart]:
    """Two tasks: other rows, another loss, another temperature."""
    return [
        part(ragged_batch(ROWS), policy_loss, entropy=True),
        part(ragged_batch(OTHER_ROWS, seed=1), square_loss, temperature=0.7),
    ]


def plain_gradients(model: PreTrainedModel, parts: Sequence[LossPart]) -> dict[str, Tensor]:
    """Of the sum of both losses, written out row by row."""
    total = torch.zeros((), dtype=torch.float64)
    for one in parts:
        picked, entropies = [], []
        for row in one.rows:
            prompt, response = row["prompt_tokens"], row["response_tokens"]
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            log_p = (logits / one.needs.temperature).log_softmax(-1)
            picked.append(log_p.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        outputs = {"log_probs": torch.cat(picked)} | ({"entropy": torch.cat(entropies)} if one.needs.entropy else {})
        every = list(range(len(one.rows)))
        total = total + MiniBatch(one, torch.float64).loss(every, one.rows, outputs).total
    total.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_gradient_of_two_losses_is_the_sum_of_theirs(kind: str, micro_batch_size: int | None) -> None:
    expected = plain_gradients(tiny_model(kind), two_parts())
    engine = make_engine(tiny_model(kind), optim=OPTIM, micro_batch_size=micro_batch_size)
    found = gradients_of(engine, two_parts())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


def test_metrics_of_parts_add_up_and_a_part_without_rows_counts_nothing() -> None:
    first, second = two_parts()
    engine = make_engine(tiny_model(), optim=OPTIM)
    alone = [engine.loss([one]) for one in (first, second)]
    empty = part(second.rows.slice(0, 0), square_loss, torch.zeros(0))
    both = engine.update([first, empty, second])
    assert both["loss"] == pytest.approx(alone[0]["loss"] + alone[1]["loss"], rel=1e-12)
    assert (both["tokens"], both["squares"]) == (alone[0]["tokens"], alone[1]["squares"])


class TwoStages:
    """`update(parts)` over two halves of a Llama that meet in hidden states and their gradients alone.

    All micro-batches of all parts go through the first stage, then through the second, and their gradients back in
    reverse: the schedule is the engine's affair, because it sees the whole step at once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, layers = model, model.model.layers
        self.first, self.second = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.adam_eps, weight_decay=OPTIM.weight_decay
        )

    def update(self, parts: Sequence[LossPart]) -> Metrics:
        sent: list[tuple[Tensor, Tensor]] = []
        losses: list[Loss] = []
        for one in parts:
            mini_batch = MiniBatch(one, torch.float64)
            for row in range(len(one.rows)):
                batch = one.rows.take([row])
                ids = torch.tensor([batch["prompt_tokens"][0] + batch["response_tokens"][0]])
                output = self._run(self.first, self.model.model.embed_tokens(ids))
                received = output.detach().requires_grad_()
                hidden = self.model.model.norm(self._run(self.second, received))[0]
                log_probs, entropy = self._head(hidden, batch["prompt_tokens"], batch["response_tokens"], one)
                outputs = {"log_probs": log_probs} | ({"entropy": entropy} if one.needs.entropy else {})
                loss = mini_batch.loss([row], batch, outputs)
                loss.total.backward()
                assert received.grad is not None
                sent.append((output, received.grad))
                losses.append(loss.detached())
        for output, gradient in reversed(sent):
            output.backward(gradient)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = float(sum(loss.total for loss in losses))
        return {**combine_metrics([loss.metrics for loss in losses]), "loss": total, "grad_norm": float(norm)}

    def _run(self, layers: nn.ModuleList, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        angles = self.model.model.rotary_emb(hidden, positions)
        for layer in layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=positions, attention_mask=None)
        return hidden

    def _head(self, hidden: Tensor, prompts: list[list[int]], responses: list[list[int]], one: LossPart) -> tuple:
        flat = pack_rows(prompts, responses)
        logits = self.model.lm_head(hidden[flat.predict]) / one.needs.temperature
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, flat.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_a_pipeline_of_two_stages_makes_the_same_steps() -> None:
    model, piped = tiny_model(), tiny_model()
    engine, pipeline = make_engine(model, optim=OPTIM, micro_batch_size=2), TwoStages(piped)
    for _ in range(3):
        whole, staged = engine.update(two_parts()), pipeline.update(two_parts())
        for name in ("loss", "grad_norm", "tokens", "squares"):
            assert whole[name] == pytest.approx(staged[name], rel=1e-10), name
    for (name, a), b in zip(model.named_parameters(), piped.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-10, name
