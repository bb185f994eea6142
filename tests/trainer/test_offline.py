"""Training from recorded responses, and from a reward under a cost, through the trainer that samples too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import verl
from verl.checkpoint.verify import verify
from verl.errors import ConfigError, DataError
from verl.models.loading import load_tokenizer

PAIRS = [{"prompt": f"Say {i}: ", "chosen": "aaaa", "rejected": "zzzz zz"} for i in range(8)]
LABELS = [{"prompt": f"Say {i}: ", "completion": "aaaa" if i % 2 else "zzzz", "label": bool(i % 2)} for i in range(8)]
DEMONSTRATIONS = [{"prompt": f"Say {i}: ", "completion": "aaaa"} for i in range(8)]
DATA = {"sft": DEMONSTRATIONS, "kto": LABELS}
OPTIM = {"lr": 3e-3}


def loader(model: Path, name: str) -> verl.OfflineDatasetLoader:
    return verl.OfflineDatasetLoader(DATA.get(name, PAIRS), load_tokenizer(model), batch_size=8)


def offline_trainer(model: Path, name: str, **options: Any) -> verl.Trainer:
    head = "score" if name == "reward_model" else "lm"
    actor = verl.Actor(str(model), optim={**OPTIM, **options}, head=head)
    return verl.Trainer(actor, algorithm=name, log_dir=False)


@pytest.mark.quick("sft", "reward_model")
@pytest.mark.parametrize("name", ["sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward_model"])
def test_recorded_responses_are_learned(tiny: Path, name: str) -> None:
    trainer, data = offline_trainer(tiny, name), loader(tiny, name)
    before = trainer.evaluate_loss(data.batch)
    assert trainer.evaluate_loss(data.batch) == before, "an evaluation changed something"
    records = [trainer.step(next(data)) for _ in range(8)]
    after = trainer.evaluate_loss(data.batch)
    assert after["loss"] < before["loss"] - 1e-3
    assert records[0]["loss/actor"] == pytest.approx(before["loss"], rel=1e-4), "one batch is all of the data"
    if "pairs/accuracy" in after:
        assert after["pairs/accuracy"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_rows_that_are_left_out_are_not_learned(tiny: Path, name: str) -> None:
    pairs = loader(tiny, "dpo").batch
    if name == "sft":
        given, used = pairs, pairs.filter([label == 1.0 for label in pairs["label"]])
    else:
        given, used = pairs.slice(0, len(pairs) - 1), pairs.slice(0, len(pairs) - 2)
    one, other = offline_trainer(tiny, name), offline_trainer(tiny, name)
    found, expected = one.step(given), other.step(used)
    assert found["loss/actor"] == pytest.approx(expected["loss/actor"], rel=1e-6)
    assert found["grad_norm/actor"] == pytest.approx(expected["grad_norm/actor"], rel=1e-5)


@pytest.mark.quick("reward_model")
@pytest.mark.parametrize("name", ["kto", "reward_model"])
def test_a_resume_is_exact(tiny: Path, tmp_path: Path, name: str) -> None:
    data = loader(tiny, name)
    batches = [next(data) for _ in range(4)]
    whole = offline_trainer(tiny, name)
    records = [whole.step(batch) for batch in batches]
    first, second = offline_trainer(tiny, name), offline_trainer(tiny, name)
    for batch in batches[:2]:
        first.step(batch)
    first.save_checkpoint(tmp_path / "checkpoint")
    second.load_checkpoint(tmp_path / "checkpoint")
    assert [second.step(batch)["loss/actor"] for batch in batches[2:]] == [r["loss/actor"] for r in records[2:]]
    found = verify(tmp_path / "checkpoint")
    assert found.ok, str(found)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_temperature_of_sampling_is_not_in_an_offline_loss(tiny: Path, name: str) -> None:
    data, cold = loader(tiny, name), verl.SamplingParams(temperature=0.5)
    expected = offline_trainer(tiny, name).step(data.batch)["loss/actor"]
    actor = verl.Actor(str(tiny), optim=OPTIM, sampling=cold)
    assert verl.Trainer(actor, algorithm=name, log_dir=False).step(data.batch)["loss/actor"] == expected
    alone = verl.Actor(str(tiny), optim=OPTIM, sampling=cold, algorithm=name)
    assert alone.update(data.batch, [0.0] * len(data.batch))["loss"] == expected


@pytest.mark.parametrize("chat", [False, True])
def test_a_trained_reward_model_is_a_reward(tiny: Path, tmp_path: Path, chat: bool) -> None:
    rows = [{**pair, "prompt": [{"role": "user", "content": pair["prompt"]}]} for pair in PAIRS] if chat else PAIRS
    trainer, data = offline_trainer(tiny, "reward_model"), verl.OfflineDatasetLoader(rows, load_tokenizer(tiny))
    for _ in range(8):
        trainer.step(next(data))
    trainer.actor.save_pretrained(str(tmp_path / "rm"))
    scores = verl.Reward(model=str(tmp_path / "rm")).get_reward(data.batch)["reward"]
    margins = [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    assert all(margin > 0 for margin in margins)
    # It scores the tokens that it was trained on, with the end of the reply.
    trained = trainer.evaluate_loss(data.batch)["pairs/margin"]
    assert sum(margins) / len(margins) == pytest.approx(trained, abs=1e-5)


def test_recorded_experience_trains_an_online_algorithm(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim=OPTIM)
    samples = actor.generate_sequences(["One", "Two"], n=4, max_new_tokens=4)
    recorded = samples.add({"reward": [float(len(set(t))) for t in samples["response_tokens"]]})
    trainer = verl.Trainer(actor, reward_fn=len, algorithm="grpo", kl_in="loss", log_dir=False)
    record = trainer.step(recorded)
    assert record["reward"] == pytest.approx(sum(recorded["reward"]) / 8)
    assert trainer.actor.policy_version == 1 and "rollout/tokens" not in record


def test_values_and_log_probs_of_a_recording_are_the_learners(tiny: Path, tmp_path: Path) -> None:
    samples = verl.Actor(str(tiny)).generate_sequences(["One", "Two"], n=2, max_new_tokens=4)
    recorded = samples.add({"reward": [1.0, 0.0, 0.5, 0.0]})
    own: dict[str, Any] = {n: [[99.0] * k for k in samples.lengths("response_tokens")] for n in ("values", "log_probs")}
    recorded.add(own).to_parquet(tmp_path / "recorded.parquet")
    data = verl.OfflineDatasetLoader(tmp_path / "recorded.parquet", batch_size=2)
    trainer = verl.Trainer(verl.Actor(str(tiny)), reward_fn=len, algorithm="ppo", kl_in="none", kl_target=None,
                           log_dir=False)  # fmt: skip
    record = trainer.step(next(data))
    assert record["mismatch/log_ratio/max"] < 1e-4 and record["policy/kl"] == pytest.approx(0, abs=1e-4)
    assert record["critic/clip_fraction"] == 0, "a new critic's values are 0, and so are the old ones"


def test_cost_beside_reward(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4))
    trainer = verl.Trainer(
        actor, reward_fn=lambda texts: [1.0] * len(texts), cost=lambda texts: [0.25] * len(texts),
        algorithm="safe_rlhf", n=2, log_dir=False,
    )  # fmt: skip
    record = trainer.step(["One", "Two"])
    assert record["reward"] == 1.0 and record["cost/mean"] == 0.25


def test_what_does_not_fit_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="head='score'"):
        verl.Trainer(verl.Actor(str(tiny)), algorithm="reward_model")
    with pytest.raises(ConfigError, match="has no reward"):
        verl.Trainer(verl.Actor(str(tiny)), reward_fn=len, algorithm="dpo")
    with pytest.raises(ConfigError, match="needs a cost"):
        verl.Trainer(verl.Actor(str(tiny)), reward_fn=len, algorithm="safe_rlhf")
    with pytest.raises(DataError, match="OfflineDatasetLoader"):
        verl.Trainer(verl.Actor(str(tiny)), algorithm="dpo", log_dir=False).step(["no response"])


@pytest.mark.parametrize(("rollout", "limit"), [("hf", 1e-4), ("embedded", 1e-5)])
def test_the_mismatch_of_every_engine_is_measured(tiny: Path, rollout: str, limit: float) -> None:
    actor = verl.Actor(str(tiny), rollout=rollout, sampling=verl.SamplingParams(max_new_tokens=4))
    trainer = verl.Trainer(actor, reward_fn=lambda texts: [*map(len, texts)], algorithm="grpo", n=2, log_dir=False)
    record = trainer.step(["One", "Two"])
    assert abs(record["mismatch/kl"]) <= record["mismatch/log_ratio/max"] < limit
    assert 0 <= record["mismatch/k3"] < limit
    assert record["mismatch/nonfinite"] == 0
