"""`TorchEngine` against plain loops: predictions, gradients of every split, steps, skips, state."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    PreTrainedModel,
)

from tests.properties import examples
from tests.training.cases import (
    OPTIM,
    ROWS,
    VOCAB,
    assert_same,
    gradients,
    log_probs,
    make_engine,
    policy_loss,
    ragged_batch,
    state_of,
    tiny_model,
    token_weights,
    update,
)
from verl.algorithms.loss_terms import Loss, LossInput
from verl.batch import Batch
from verl.errors import ConfigError, DataError, TrainingError
from verl.models.heads import ValueModel
from verl.training.micro_batch import Limits
from verl.training.options import OptimConfig
from verl.training.torch_engine import TorchEngine
from verl.weights.shard import Shard


def plain_log_probs(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the model's own forward, one row at a time."""
    picked, entropies = [], []
    for row in batch:
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        picked.append(log_p.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(picked), torch.cat(entropies)


def plain_loss(model: PreTrainedModel, batch: Batch, temperature: float, entropy: bool) -> Tensor:
    """`policy_loss` of a whole mini-batch, written out."""
    log_probs, entropies = plain_log_probs(model, batch, temperature)
    mask = batch.tensor("response_mask").double()
    per_token = -log_probs * batch.tensor("advantages") + 0.1 * log_probs.square()
    if entropy:
        per_token = per_token - 0.3 * entropies
    loss = (per_token * mask / mask.sum()).sum()
    for reward, part in zip(batch["reward"], (log_probs * mask).split(batch.lengths("response_tokens")), strict=True):
        loss = loss + reward * part.sum() / len(batch)
    return loss


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def _engine(kind: str, dtype: torch.dtype, share: bool) -> TorchEngine:
    return make_engine(tiny_model(kind, dtype), optim=OPTIM, share_prompts=share)


def shared_engine(
    kind: str,
    dtype: torch.dtype = torch.float64,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    share: bool = True,
) -> TorchEngine:
    """An engine for tests that do not step, with these caps."""
    engine = _engine(kind, dtype, share)
    engine.limits = Limits(max_tokens, max_rows, share)
    return engine


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("share", [True, False])
def test_log_probs_are_those_of_the_plain_forward_in_the_order_of_the_rows(kind: str, share: bool) -> None:
    batch = ragged_batch(ROWS)
    engine = make_engine(tiny_model(kind), max_tokens_per_micro_batch=14, share_prompts=share)
    found = engine.predict(batch, ("log_probs", "entropy"), temperature=0.7)
    log_probs, entropies = plain_log_probs(engine.model, batch, 0.7)
    torch.testing.assert_close(found["log_probs"], log_probs.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["entropy"], entropies.detach(), rtol=1e-10, atol=1e-10)
    assert not found["log_probs"].requires_grad
    assert engine.predict(batch, ("log_probs",)).keys() == {"log_probs"}
    assert {k: v.shape for k, v in engine.predict(batch.slice(0, 0), ("log_probs", "entropy")).items()} == {
        "log_probs": (0,),
        "entropy": (0,),
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2", "window", "mixtral"])
def test_padded_rows_give_the_losses_of_packed_ones(kind: str) -> None:
    batch = ragged_batch(ROWS)
    packed, padded = (
        make_engine(tiny_model(kind), optim=OPTIM, micro_batch_size=4, remove_padding=flag) for flag in (True, False)
    )
    shapes = set()
    padded.forward.packed.backbone.register_forward_pre_hook(
        lambda module, args, given: shapes.add(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    for _ in range(3):
        expected, found = update(packed, batch, entropy=True), update(padded, batch, entropy=True)
        assert found == pytest.approx(expected, abs=1e-10)
    assert_same(weights_of(padded.model), weights_of(packed.model), 1e-9)
    assert shapes == {(2, 5), (2, 12), (3, 12)}  # rows, and tokens of the longest


@examples(25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8).filter(
        lambda r: any(n for _, n in r)
    ),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["llama", "gpt2"]),
)
def test_no_split_changes_the_gradient(
    rows: list[tuple[int, int]], max_tokens: int | None, max_rows: int | None, coupled: bool, entropy: bool, kind: str
) -> None:
    batch = ragged_batch(rows)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        whole = gradients(shared_engine(kind, dtype), batch, entropy=entropy)
        engine = shared_engine(kind, dtype, max_tokens, max_rows)
        assert_same(whole, gradients(engine, batch, entropy=entropy, coupled=coupled), tolerance)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sharing_prompts_does_not_change_the_gradient(kind: str) -> None:
    batch = ragged_batch(ROWS)
    shared, apart = (shared_engine(kind, share=share) for share in (True, False))
    assert_same(gradients(shared, batch, entropy=True), gradients(apart, batch, entropy=True), 1e-10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_steps_equal_a_plain_loop(kind: str, checkpointing: bool) -> None:
    model, plain = tiny_model(kind), tiny_model(kind)
    engine = make_engine(model, optim=OPTIM, max_tokens_per_micro_batch=16, gradient_checkpointing=checkpointing)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for step in range(3):
        batch = ragged_batch(ROWS, seed=step)
        metrics = update(engine, batch, temperature=0.8, entropy=True)
        loss = plain_loss(plain, batch, 0.8, entropy=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
        assert metrics["lr"] == 1e-2
        assert metrics["update/skipped"] == 0.0
        assert metrics["tokens"] == pytest.approx(1.0)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-9, name
    assert not model.training


def test_the_record_of_a_micro_batch_is_what_it_says() -> None:
    batch = ragged_batch(ROWS)
    seen: list[LossInput] = []

    def loss_fn(x: LossInput) -> Loss:
        seen.append(x)
        return policy_loss(x)

    engine = shared_engine("llama", max_rows=3)
    gradients(engine, batch, loss_fn=loss_fn)
    assert sum(x.num_sequences for x in seen) == len(ROWS)
    advantages = dict(zip(batch["reward"], batch["advantages"], strict=True))
    for x in seen:
        assert (x.total_sequences, x.total_groups) == (7, 4)
        assert x.total_tokens == int(batch.tensor("response_mask").sum())
        assert x.total_active == sum(int(other.weights.count_nonzero()) for other in seen)
        assert x.log_probs is not None
        assert x.log_probs.shape == x.weights.shape == x.mask.shape == x.sequence.shape
        assert x.entropy is x.values is x.scores is None
        for row, reward in enumerate(x.columns["reward"].tolist()):
            assert x.columns["advantages"][x.sequence == row].tolist() == advantages[reward]
        assert x.columns["group"].shape == (x.num_sequences,)
        assert x.mask.dtype == torch.bool


def test_old_log_probs_are_the_present_ones_unless_the_batch_has_them() -> None:
    batch = ragged_batch(ROWS)
    engine = shared_engine("llama")
    seen: list[LossInput] = []

    def loss_fn(x: LossInput) -> Loss:
        seen.append(x)
        return policy_loss(x)

    columns = ["advantages", "reward", "old_log_probs"]
    gradients(engine, batch, loss_fn=loss_fn, columns=columns)
    gradients(engine, batch.add({"old_log_probs": batch["advantages"]}), loss_fn=loss_fn, columns=columns)
    assert seen[0].log_probs is not None
    assert torch.equal(seen[0].columns["old_log_probs"], seen[0].log_probs)
    assert not seen[0].columns["old_log_probs"].requires_grad
    expected = torch.where(seen[1].mask, seen[1].columns["advantages"], 0.0)  # where the policy wrote nothing: 0
    assert torch.equal(seen[1].columns["old_log_probs"], expected)


def test_rows_of_a_coupled_group_meet_in_one_micro_batch() -> None:
    batch = ragged_batch([(p, 6) for p in range(5) for _ in range(2)])
    sizes: list[list[int]] = []

    def loss_fn(x: LossInput) -> Loss:
        sizes.append(torch.bincount(x.columns["group"]).tolist())
        return policy_loss(x)

    engine = shared_engine("gpt2", max_tokens=14)
    gradients(engine, batch, loss_fn=loss_fn, coupled=True)
    assert len(sizes) > 1
    assert all(count == 2 for counts in sizes for count in counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_everything_bit_identical(dtype: torch.dtype, bad: float, where: str) -> None:
    batch = ragged_batch(ROWS)
    engine = make_engine(tiny_model("llama", dtype), optim=OPTIM, micro_batch_size=2)
    update(engine, batch)
    before = weights_of(engine.model)
    tensors, meta = {name: tensor.clone() for name, tensor in state_of(engine).items()}, engine.state()[1]
    count = 0

    def loss_fn(x: LossInput) -> Loss:
        nonlocal count
        loss, count = policy_loss(x), count + 1
        assert x.log_probs is not None
        if count == 2:
            if where == "loss":
                return Loss(total=loss.total + bad)  # its gradient is finite
            x.log_probs.register_hook(lambda gradient: gradient * bad)
        return loss

    metrics = update(engine, batch, loss_fn)
    assert metrics["update/skipped"] == 1.0
    assert not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
    assert all(torch.equal(p, before[name]) for name, p in engine.model.named_parameters())
    assert engine.state()[1] == meta
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in state_of(engine).items())
    assert update(engine, batch)["update/skipped"] == 0.0
    assert all(torch.isfinite(p).all() for p in engine.model.parameters())


def test_a_loss_that_raises_leaves_no_gradient_behind() -> None:
    batch = ragged_batch(ROWS)
    engine, twin = (make_engine(tiny_model(), optim=OPTIM, micro_batch_size=2) for _ in range(2))
    count = 0

    def broken(x: LossInput) -> Loss:
        nonlocal count
        count += 1
        if count == 3:
            raise ZeroDivisionError
        return policy_loss(x)

    with pytest.raises(ZeroDivisionError):
        update(engine, batch, broken)
    update(engine, batch)
    update(twin, batch)
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), twin.model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_and_shards_go_on_bit_for_bit_in_another_engine(dtype: torch.dtype) -> None:
    optim = OPTIM.model_copy(update={"schedule": "linear", "total_steps": 9})
    engine = make_engine(tiny_model("gpt2", dtype), optim=optim, micro_batch_size=3)
    for seed in range(3):
        update(engine, ragged_batch(ROWS, seed))
    shards = {shard.name: shard.tensor.clone() for shard in engine.shards()}
    tensors, meta = state_of(engine), engine.state()[1]
    assert {name.rpartition(".")[0] for name in tensors} <= shards.keys()
    assert ("transformer.wte.weight.master" in tensors) == (dtype == torch.bfloat16)
    assert not any(name.startswith("lm_head") for name in tensors)  # tied: counted once

    other = tiny_model("gpt2", dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    resumed = make_engine(other, optim=optim, micro_batch_size=3)
    resumed.load_shards(Shard.whole(name, tensor) for name, tensor in shards.items())
    resumed.load_state(
        [Shard.whole(name, tensor.clone()) for name, tensor in tensors.items()], json.loads(json.dumps(meta))
    )
    for seed in range(3, 6):
        batch = ragged_batch(ROWS, seed)
        assert update(engine, batch) == update(resumed, batch)
    for (name, a), b in zip(engine.model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_loaded_shards_reach_the_masters() -> None:
    engine = make_engine(tiny_model("llama", torch.bfloat16), optim=OPTIM)
    donor = make_engine(tiny_model("llama", torch.bfloat16), optim=OPTIM)
    update(donor, ragged_batch(ROWS))
    engine.load_shards(donor.shards())
    masters = {n: t for n, t in state_of(engine).items() if n.endswith(".master")}
    assert masters
    for name, weight in donor.model.named_parameters():
        assert torch.equal(masters[f"{name}.master"], weight.float())


def test_bf16_weights_learn_what_is_below_their_resolution() -> None:
    optim = OptimConfig(lr=1e-5, max_grad_norm=None)
    batch = ragged_batch(ROWS)
    model = tiny_model("llama", torch.bfloat16)
    engine = make_engine(model, optim=optim)
    name, weight = "model.norm.weight", model.model.norm.weight
    start = weight.detach().float()
    moved = []
    for _ in range(4):
        update(engine, batch)
        moved.append((state_of(engine)[f"{name}.master"] - start).abs().mean().item())
    assert torch.equal(weight.float(), start)  # nothing to see in bf16 yet
    assert moved == sorted(moved)
    assert moved[-1] > 3e-5


def test_a_callers_own_optimizer_trains() -> None:
    model, plain = tiny_model(), tiny_model()
    engine = make_engine(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for seed in range(3):
        batch = ragged_batch(ROWS, seed)
        metrics = update(engine, batch)
        plain_loss(plain, batch, 1.0, entropy=False).backward()
        sgd.step()
        sgd.zero_grad()
        assert metrics["lr"] == 0.05
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_schedule_moves_with_steps_that_happen() -> None:
    optim = OptimConfig(lr=1e-3, warmup_steps=2, schedule="linear", total_steps=4)
    engine = make_engine(tiny_model(), optim=optim)
    batch = ragged_batch(ROWS)
    rates = [update(engine, batch)["lr"] for _ in range(2)]
    rates.append(update(engine, batch, lambda x: Loss(total=policy_loss(x).total * math.nan))["lr"])
    rates += [update(engine, batch)["lr"] for _ in range(3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 5e-4, 0.0])


@pytest.mark.slow
def test_autocast_computes_in_bf16_and_updates_fp32() -> None:
    batch = ragged_batch(ROWS)
    exact = make_engine(tiny_model("llama", torch.float32), optim=OPTIM)
    mixed = make_engine(tiny_model("llama", torch.float32), optim=OPTIM, use_amp=True)
    seen: list[torch.dtype] = []
    mixed.model.model.layers[0].mlp.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    a, b = log_probs(exact, batch), log_probs(mixed, batch)
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.1)
    for name, gradient in gradients(exact, batch).items():
        found = gradients(mixed, batch)[name]
        assert found.dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), found.flatten(), dim=0) > 0.99, name
    assert set(seen) == {torch.bfloat16}
    assert not any(name.endswith(".master") for name in state_of(mixed))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_values_are_of_the_states_before_each_token_and_train_as_a_plain_loop(kind: str) -> None:
    def value_model() -> ValueModel:
        model = ValueModel.from_model(tiny_model(kind))
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
        return model

    model, plain = value_model(), value_model()
    batch = ragged_batch(ROWS)
    engine = make_engine(model, optim=OPTIM, head="value", max_tokens_per_micro_batch=16)

    def plain_values() -> Tensor:
        values = []
        for row in batch:
            prompt, response = row["prompt_tokens"], row["response_tokens"]
            hidden = plain.backbone(input_ids=torch.tensor([prompt + response]))[0][0]
            values.append((hidden @ plain.score.weight[0] + plain.score.bias)[len(prompt) - 1 : -1])
        return torch.cat(values)

    torch.testing.assert_close(
        engine.predict(batch, ("values",))["values"], plain_values().detach(), rtol=1e-10, atol=1e-10
    )

    def critic_loss(x: LossInput) -> Loss:
        assert x.values is not None
        return Loss(total=(x.weights * (x.values - x.columns["advantages"]).square()).sum())

    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(3):
        update(engine, batch, critic_loss)
        (token_weights(batch) * (plain_values() - batch.tensor("advantages")).square()).sum().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-9, name


def test_scores_are_read_at_the_last_token_and_train() -> None:
    model = ValueModel.from_model(tiny_model())
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    engine = make_engine(model, optim=OPTIM, head="score", micro_batch_size=2)
    batch = ragged_batch(ROWS)
    expected = []
    for row in batch:
        tokens = torch.tensor([row["prompt_tokens"] + row["response_tokens"]])
        expected.append(model.score(model.backbone(input_ids=tokens)[0][0, -1:])[0])
    torch.testing.assert_close(
        engine.predict(batch, ("scores",))["scores"], torch.stack(expected).detach(), rtol=1e-10, atol=1e-10
    )

    def regression(x: LossInput) -> Loss:
        assert x.scores is not None
        return Loss(total=(x.scores - x.columns["reward"]).square().sum() / x.total_sequences)

    losses = [update(engine, batch, regression)["loss"] for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_misuse_is_named() -> None:
    batch = ragged_batch(ROWS)
    reader = make_engine(tiny_model())
    with pytest.raises(TrainingError, match="only read"):
        update(reader, batch)
    with pytest.raises(TrainingError, match="head of kind 'lm'"):
        reader.predict(batch, ("values",))
    engine = make_engine(tiny_model(), optim=OPTIM, micro_batch_size=1)
    with pytest.raises(DataError, match="no rows"):
        update(engine, batch.slice(0, 0), weights=torch.zeros(0))
    with pytest.raises(DataError, match="weights"):
        update(engine, batch, weights=torch.ones(3))
    with pytest.raises(TrainingError, match="must return a Loss"):
        update(engine, batch, lambda x: x.weights.sum())  # type: ignore[arg-type,return-value]
    with pytest.raises(TrainingError, match="sum it"):
        update(engine, batch, lambda x: Loss(total=x.weights))
    with pytest.raises(TrainingError, match="does not depend"):
        update(engine, batch, lambda x: Loss(total=x.weights.sum()))
    short = batch.drop(["advantages"]).add({"advantages": [[0.0]] * len(batch)})
    with pytest.raises(DataError, match=r"column 'advantages' has 1 values for 5 .* \(id 3/0\)"):
        update(engine, short)
    frozen = tiny_model()
    frozen.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        make_engine(frozen, optim=OPTIM)


def test_rows_longer_than_the_learned_positions_are_named() -> None:
    batch = ragged_batch([(3, 2), (3, 126), (1, 4)])  # 4 + 126 tokens, the last of which is not fed
    engine = make_engine(tiny_model("gpt2"), optim=OPTIM)
    with pytest.raises(DataError, match=r"row 1.*129 tokens.*128 positions"):
        log_probs(engine, batch)
    with pytest.raises(DataError, match="row 1"):
        update(engine, batch)
    log_probs(engine, ragged_batch([(3, 125)]))
    log_probs(make_engine(tiny_model("llama")), batch)  # its positions are computed


def test_tokens_of_another_vocabulary_are_named() -> None:
    batch = ragged_batch([(3, 0), (3, 2), (1, 4)])
    responses = [row or [] for row in batch["response_tokens"]]
    responses[1][-1] = VOCAB
    ended = batch.drop(["response_tokens"]).add({"response_tokens": responses})
    with pytest.raises(DataError, match=f"response_tokens has token {VOCAB}, .* embeds {VOCAB}"):
        log_probs(make_engine(tiny_model()), ended)
    critic = make_engine(ValueModel.from_model(tiny_model()), head="value")
    assert critic.predict(ended, ("values",))["values"].shape == (6,)  # no value follows the last token
    responses[1][0] = VOCAB
    with pytest.raises(DataError, match=r"another vocabulary needs its own \(tokenizer=\)"):
        critic.predict(batch.drop(["response_tokens"]).add({"response_tokens": responses}), ("values",))["values"]


def test_a_critic_over_a_backbone_of_that_very_name() -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4)
    torch.manual_seed(0)
    critic = ValueModel.from_model(AutoModelForCausalLM.from_config(config).eval())
    assert critic.backbone.base_model_prefix == "backbone"
    assert "backbone.layers.0.norm.weight" in critic.state_dict()
    engine = make_engine(critic, optim=OPTIM, head="value")
    batch = ragged_batch(ROWS)
    assert engine.predict(batch, ("values",))["values"].shape == (sum(batch.lengths("response_tokens")),)
