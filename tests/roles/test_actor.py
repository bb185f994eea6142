"""The actor's calls on a tiny real model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
)

import verl
from tests.conftest import byte_tokenizer, config_of
from tests.templates import FAMILIES
from tests.workers.test_sync import Copying
from verl.algorithms import make_algorithm
from verl.errors import ConfigError, DataError, ModelError, RolloutError
from verl.models.loading import load_model
from verl.models.options import ModelOptions
from verl.rollout.embedded import engine as embedded
from verl.rollout.options import RolloutOptions
from verl.training.options import OptimConfig, TrainOptions
from verl.weights.shard import checksum
from verl.weights.shards import model_shards

PROMPTS = ["Once upon a time", "In the beginning"]


@pytest.fixture
def actor(tiny: Path) -> verl.Actor:
    return verl.Actor.from_pretrained(
        str(tiny), optim={"lr": 1e-2}, sampling=verl.SamplingParams(max_new_tokens=8, ignore_eos=True)
    )


def plain_log_probs(model: Any, row: dict[str, Any]) -> torch.Tensor:
    ids = torch.tensor([row["prompt_tokens"] + row["response_tokens"]])
    logits = model(ids).logits[0, len(row["prompt_tokens"]) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(row["prompt_tokens"]) :, None])[:, 0]


def test_prompts_in_every_form(actor: verl.Actor) -> None:
    tokenizer = actor.tokenizer
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    forms: list[tuple[Any, list[int]]] = [
        ("Hi", tokenizer("Hi")["input_ids"]),
        (["Hi"], tokenizer("Hi")["input_ids"]),
        ([chat], tokenizer(rendered)["input_ids"]),
        ([[5, 6, 7]], [5, 6, 7]),
        ([{"prompt": "Hi", "answer": 3}], tokenizer("Hi")["input_ids"]),
        (verl.Batch.from_columns({"prompt": ["Hi"]}), tokenizer("Hi")["input_ids"]),
    ]
    for given, tokens in forms:
        assert actor.prompts(given)["prompt_tokens"] == [tokens], given
    with pytest.raises(DataError, match="empty"):
        actor.prompts([])
    with pytest.raises(DataError, match="empty"):
        actor.prompts([""])


def test_samples_carry_their_log_probs_and_texts(actor: verl.Actor) -> None:
    sequences = actor.generate_sequences(PROMPTS, n=3)
    assert len(sequences) == 6
    assert sequences["group"] == [sequences["group"][0]] * 3 + [sequences["group"][3]] * 3
    again = actor.compute_log_probs(sequences)["log_probs"]
    for row, log_probs in zip(sequences.rows(), again, strict=True):
        expected = plain_log_probs(actor.model, row)
        torch.testing.assert_close(torch.tensor(row["rollout_log_probs"]), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
        (end,) = actor.ends
        written = [token for token in row["response_tokens"] if token != end]
        assert row["response"] == actor.tokenizer.decode(written)  # other special tokens are part of the text


def test_the_log_probs_of_an_fp64_models_samples_are_fp64(make_tiny: Callable[..., Path]) -> None:
    sampling = verl.SamplingParams(max_new_tokens=4)
    actor = verl.Actor(str(make_tiny("gpt2", torch.float64)), dtype="float64", sampling=sampling)
    batch = actor.generate_sequences(["a", "b"])
    ours, theirs = actor.compute_log_probs(batch).tensor("log_probs"), batch.tensor("rollout_log_probs")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)


def test_the_key_fixes_the_samples(actor: verl.Actor) -> None:
    first = actor.generate_sequences(PROMPTS, n=2, key="a")
    assert actor.generate_sequences(PROMPTS, n=2, key="a") == first
    assert actor.generate_sequences(PROMPTS, n=2)["response_tokens"] != first["response_tokens"]
    one = actor.generate_sequences(PROMPTS[:1], n=2, key="a")
    assert one["response_tokens"] == first["response_tokens"][:2]


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_engines_serve_the_weights_that_are_trained(tiny: Path, engine: str) -> None:
    actor = verl.Actor(str(tiny), rollout=engine, optim={"lr": 1e-2}, sampling=verl.SamplingParams(max_new_tokens=8))
    for step in range(3):
        sequences = actor.generate_sequences(PROMPTS, n=4)
        now = actor.compute_log_probs(sequences).tensor("log_probs")
        assert float((now - sequences.tensor("rollout_log_probs")).abs().max()) < 1e-4
        assert set(sequences["policy_version"]) == {step}
        actor.update(sequences, [float(i % 2) for i in range(8)])


@pytest.mark.quick("embedded")
@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_a_bf16_engine_is_as_near_after_updates_as_a_fresh_one(
    make_tiny: Callable[..., Path], tmp_path: Path, engine: str
) -> None:
    sampling = verl.SamplingParams(max_new_tokens=24, ignore_eos=True)
    start = str(make_tiny(dtype=torch.bfloat16))
    actor = verl.Actor(start, dtype="bfloat16", rollout=engine, optim={"lr": 1e-2}, sampling=sampling)
    for _ in range(5):
        actor.update(actor.generate_sequences(PROMPTS, n=4), [float(i % 2) for i in range(8)])
    actor.save_pretrained(str(tmp_path))

    def gap(actor: verl.Actor) -> float:
        rows = actor.generate_sequences(PROMPTS, n=16, key="same")
        now = actor.compute_log_probs(rows).tensor("log_probs")
        return float((now - rows.tensor("rollout_log_probs")).abs().mean())

    after, fresh = gap(actor), gap(verl.Actor(str(tmp_path), dtype="bfloat16", rollout=engine, sampling=sampling))
    assert after < 0.05
    assert after <= 1.2 * fresh


def test_a_live_model_and_its_tokenizer(tiny: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    for given in (tokenizer, str(tiny), None):
        actor = verl.Actor(model=model, tokenizer=given, strategy="fsdp")
        assert actor.tokenizer.get_vocab() == tokenizer.get_vocab()
        assert actor.model is model
    fresh = AutoModelForCausalLM.from_config(config_of("llama"))
    with pytest.raises(ModelError, match="tokenizer="):
        verl.Actor(model=fresh)
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        verl.Actor(model=model, strategy="fsdpp")
    with pytest.raises(ModelError, match="no language model"):
        verl.Actor(model=torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_users_own_optimizer(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    actor = verl.Actor(model=model, optim=optimizer)
    before = checksum(model_shards(model))
    metrics = actor.update(actor.generate_sequences(PROMPTS, n=2, max_new_tokens=4), [1.0, 0.0, 0.0, 1.0])
    assert metrics["lr"] == 0.1
    assert checksum(model_shards(model)) != before


def test_rewards_in_every_form_give_one_update(tiny: Path) -> None:
    results = []
    values = [1.0, 0.0, None, 2.0]
    for form in ("list", "tensor", "batch"):
        actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=verl.SamplingParams(max_new_tokens=4))
        sequences = actor.generate_sequences(PROMPTS, n=2, key="k")
        rewards: Any = values
        if form == "tensor":
            rewards = torch.tensor([float("nan") if v is None else v for v in values])
        if form == "batch":
            rewards = verl.Batch.from_columns({"id": sequences["id"], "reward": values})
        metrics = actor.update(sequences, rewards)
        assert metrics["abstained"] == 1
        results.append(checksum(actor.shards()))
    assert len(set(results)) == 1
    with pytest.raises(DataError, match="other samples"):
        actor.update(sequences, verl.Batch.from_columns({"id": ["x"] * 4, "reward": values}))


def test_rewards_that_are_there_already_are_not_passed_over(tiny: Path) -> None:
    actor = verl.Actor(str(tiny))
    samples = actor.generate_sequences(["A"], n=3)
    rewards = [
        verl.Batch.from_columns({"id": samples["id"], "reward": values})
        for values in ([0.0, 1.0, 2.0], [2.0, 1.0, 0.0])
    ]
    scored = samples.add(rewards[0])
    actor.update(scored, rewards[0])
    with pytest.raises(DataError, match="'reward' is there already, with other numbers"):
        actor.update(scored, rewards[1])
    with pytest.raises(DataError, match="have no column 'reward'"):
        actor.update(samples, verl.Batch.from_columns({"id": samples["id"], "score": [1.0] * 3}))


def test_the_temperature_of_a_call_is_that_of_its_update(tiny: Path) -> None:
    """The same samples, by a keyword and by the actor's own setting, give the same update."""
    settings = verl.SamplingParams(max_new_tokens=6), verl.SamplingParams(max_new_tokens=6, temperature=0.3)
    actors = [verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=one) for one in settings]
    samples = [
        actors[0].generate_sequences(["A", "B"], n=4, key="k", temperature=0.3),
        actors[1].generate_sequences(["A", "B"], n=4, key="k"),
    ]
    assert samples[0]["response_tokens"] == samples[1]["response_tokens"]
    assert actors[0].compute_log_probs(samples[0])["log_probs"] == actors[1].compute_log_probs(samples[1])["log_probs"]
    for actor, own in zip(actors, samples, strict=True):
        actor.update(own, [float(i) for i in range(8)])
    assert checksum(actors[0].shards()) == checksum(actors[1].shards())
    mixed = verl.Batch.concat([actors[0].generate_sequences(["A"], n=2, temperature=t) for t in (0.5, 0.7)])
    with pytest.raises(DataError, match=r"temperatures \[0\.5, 0\.7\]"):
        actors[0].compute_log_probs(mixed)


def test_two_handles_of_one_model_each_train_it_whole(tiny: Path) -> None:
    def step(model: Any, key: str) -> None:
        actor = verl.Actor(model, str(tiny), optim={"lr": 1e-2}, sampling=verl.SamplingParams(max_new_tokens=6))
        actor.update(actor.generate_sequences(["A", "B"], n=4, key=key), [float(i) for i in range(8)])

    model = AutoModelForCausalLM.from_pretrained(tiny)
    step(model, "1")
    fresh = AutoModelForCausalLM.from_pretrained(tiny)
    fresh.load_state_dict(model.state_dict())
    for one in (model, fresh):
        step(one, "2")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name]), name
    # A user's own backward pass gets its gradients.
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_reference_stays_as_it_was(actor: verl.Actor) -> None:
    actor.make_reference()
    sequences = actor.generate_sequences(PROMPTS, n=2)
    start = actor.compute_ref_log_probs(sequences)["ref_log_probs"]
    actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
    assert actor.compute_ref_log_probs(sequences)["ref_log_probs"] == start
    assert actor.compute_log_probs(sequences)["log_probs"] != start


def test_a_reference_after_an_update_is_refused(actor: verl.Actor) -> None:
    sequences = actor.generate_sequences(PROMPTS, n=2)
    actor.update(sequences, [1.0, 0.0, 0.0, 1.0])
    with pytest.raises(ModelError, match="before the first update"):
        actor.compute_ref_log_probs(sequences)


def test_several_steps_of_one_batch_have_ratios(tiny: Path) -> None:
    actor = verl.Actor(
        str(tiny),
        optim={"lr": 1e-1},
        mini_batch_size=4,
        epochs=2,
        sampling=verl.SamplingParams(max_new_tokens=4),
    )
    sequences = actor.generate_sequences(PROMPTS, n=4)
    metrics = actor.update(sequences, [float(i % 2) for i in range(8)])
    assert metrics["policy/clip_fraction"] > 0


def test_recorded_samples_are_never_the_policys_own(actor: verl.Actor, tiny: Path, tmp_path: Path) -> None:
    algorithm = verl.algorithms.make_algorithm("grpo")
    own = actor.generate_sequences(PROMPTS, n=2)
    own.to_parquet(tmp_path / "own.parquet")
    recorded = verl.OfflineDatasetLoader(tmp_path / "own.parquet").batch
    assert not actor.needs_old_log_probs(algorithm, own)
    assert verl.Actor(str(tiny)).needs_old_log_probs(algorithm, recorded)


def test_where_the_engine_has_other_numbers_tokens_are_weighted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the embedded engine takes other kernels than a training step, also on the policy's own samples."""
    monkeypatch.setattr(embedded, "is_host", lambda device: False)
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4))
    algorithm = make_algorithm("grpo")
    samples = actor.generate_sequences(PROMPTS, n=2)
    assert actor.needs_old_log_probs(algorithm, samples)
    off = [[value - 1.0 for value in row] for row in samples["rollout_log_probs"]]
    samples = samples.drop(["rollout_log_probs"]).add({"rollout_log_probs": off, "reward": [0.0, 1.0] * 2})
    read = samples.add(actor.compute_log_probs(samples))
    prepared, metrics = algorithm.prepare(read)
    assert metrics["mismatch/ess"] > 0.99 and metrics["mismatch/kl"] < -0.9
    weights = prepared.tensor("rollout_is_weights")
    assert weights.min() == weights.max() == 2.0, "truncated"
    assert "old_log_probs" not in actor.update_part(prepared, algorithm).rows, "of the step's own forward"


def test_samples_of_other_weights_are_not_the_policys_own(
    actor: verl.Actor, make_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever their version says: another actor has the same numbers."""
    algorithm, rewards = make_algorithm("grpo"), [0.0, 1.0, 0.0, 1.0]
    other = verl.Actor(str(make_tiny(seed=1)), sampling=actor.sampling)
    theirs, ours = other.generate_sequences(PROMPTS, n=2), actor.generate_sequences(PROMPTS, n=2)
    assert theirs["policy_version"] == ours["policy_version"] and theirs["id"] == ours["id"]
    assert actor.needs_old_log_probs(algorithm, theirs) and not actor.needs_old_log_probs(algorithm, ours)
    theirs.to_parquet(tmp_path / "theirs.parquet")
    trainer = verl.Trainer(actor, reward_fn=len, algorithm="grpo", log_dir=False)
    record = trainer.step(verl.Batch.from_parquet(tmp_path / "theirs.parquet").add({"reward": rewards}))
    assert record["mismatch/ess"] < 0.99, "their tokens are weighted"
    assert actor.needs_old_log_probs(algorithm, ours), "of weights that have been updated"
    ours = actor.generate_sequences(PROMPTS, n=2)
    actor.load_shards(list(other.shards()))
    assert actor.needs_old_log_probs(algorithm, ours), "of weights that have been replaced"


def test_an_engine_with_a_copy_gets_the_weights_that_are_loaded(tiny: Path, make_tiny: Callable[..., Path]) -> None:
    other = verl.Actor(str(make_tiny(seed=1)), sampling=verl.SamplingParams(max_new_tokens=4))
    actor = verl.Actor(str(tiny), rollout=Copying, sampling=other.sampling)
    actor.generate_sequences(PROMPTS)
    actor.load_shards(list(other.shards()))
    served, expected = (each.generate_sequences(PROMPTS, key="k")["response_tokens"] for each in (actor, other))
    assert served == expected


def test_a_model_without_a_packed_forward(make_tiny: Callable[..., Path], tiny: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Gemma2ForCausalLM(config).eval()
    actor = verl.Actor(model=model, tokenizer=str(tiny), optim={"lr": 1e-2})
    sequences = actor.generate_sequences(PROMPTS, n=2, max_new_tokens=6)
    now = actor.compute_log_probs(sequences).tensor("log_probs")
    assert float((now - sequences.tensor("rollout_log_probs")).abs().max()) < 1e-3
    assert actor.update(sequences, [1.0, 0.0, 0.0, 1.0])["grad_norm"] > 0


def test_a_directory_that_cannot_be_is_named(actor: verl.Actor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"the model cannot be written to .*file"):
        actor.save_pretrained(tmp_path / "file")


def test_save_pretrained_loads_in_transformers(actor: verl.Actor, tmp_path: Path) -> None:
    actor.update(actor.generate_sequences(PROMPTS, n=2), [1.0, 0.0, 0.0, 1.0])
    actor.save_pretrained(str(tmp_path / "out"))
    ids = torch.tensor([[5, 6, 7]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(ids).logits, actor.model(ids).logits)


def test_wrong_settings_are_named(tiny: Path, actor: verl.Actor) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        verl.Actor(str(tiny), optim={"lrr": 1.0})
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        verl.Actor(str(tiny), optim={"lr": -1.0})
    with pytest.raises(ConfigError, match="OptimConfig"):
        verl.Actor(str(tiny), optim=5)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        actor.generate_sequences(PROMPTS, max_tokens=3)
    with pytest.raises(ConfigError, match="at least 1"):
        actor.generate_sequences(PROMPTS, n=0)


def test_what_is_no_reward_or_no_batch_is_told_by_row(actor: verl.Actor) -> None:
    sequences = actor.generate_sequences(["One", "Two"], max_new_tokens=2)
    for method in (actor.update, verl.Updater("gpg", actor=actor).update):
        with pytest.raises(DataError, match=r"reward of row 1 is 'a': give a number, or None"):
            method(sequences, [1.0, "a"])
        with pytest.raises(DataError, match=r"list or tensor of 2 numbers, not 5"):
            method(sequences, 5)
        with pytest.raises(DataError, match="sequences are a Batch of generate_sequences, not a int"):
            method(5, [1.0])


def test_texts_and_token_ids_may_be_mixed(actor: verl.Actor) -> None:
    one = actor.tokenizer("One")["input_ids"]
    assert actor.prompts(["One", one])["prompt_tokens"] == [one, one]


def test_rewards_read_the_text_of_token_ids(actor: verl.Actor) -> None:
    seen: list[str] = []

    def reward(responses: list[str], prompts: list[str]) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(responses)

    verl.Reward(reward).get_reward(actor.generate_sequences([actor.tokenizer(PROMPTS[0])["input_ids"]], n=2))
    assert seen == [PROMPTS[0]] * 2
    with pytest.raises(RolloutError, match="token -1 is outside the vocabulary"):
        actor.generate_sequences([[5, -1]])


def test_an_actor_of_nonsense_is_refused_when_it_is_made(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="no rollout engine is called 'embeded': did you mean 'embedded'"):
        verl.Actor(str(tiny), rollout="embeded")
    with pytest.raises(ConfigError, match="mini_batch_size: must be at least 1"):
        verl.Actor(str(tiny), mini_batch_size=0)
    with pytest.raises(ConfigError, match="epochs: must be at least 1"):
        verl.Actor(str(tiny), epochs=0)
    for wrong, said in (
        ({"use_amp": "yes"}, r"Actor\.use_amp: must be true or false, not 'yes'"),
        ({"optim": {"lr": True}}, r"optim\.lr: must be a number, not true"),
        ({"train": {"epochs": 1.0}}, r"train\.epochs: must be a whole number, not 1\.0"),
        ({"epoch": 2}, "Actor has no setting 'epoch': did you mean 'epochs'"),
        ({"n": 2}, "Actor has no setting 'n'"),
        ({"max_num_seqs": True}, r"Actor\.max_num_seqs: must be a whole number, not true"),
    ):
        with pytest.raises(ConfigError, match=said):
            verl.Actor(str(tiny), **wrong)
    with pytest.raises(ModelError, match="tokenizer is a tokenizer of transformers, or its name or directory, not 5"):
        verl.Actor(str(tiny), tokenizer=5)  # type: ignore[arg-type]


def test_a_section_of_a_file_is_what_the_constructor_takes(tiny: Path) -> None:
    model = ModelOptions(path=str(tiny), dtype="bfloat16", enable_gradient_checkpointing=True)
    train = TrainOptions(optim=OptimConfig(lr=1e-3), mini_batch_size=4, epochs=2, micro_batch_size=1)
    rollout = RolloutOptions(name="hf", max_num_seqs=3, kv_cache_gb=0.5, max_new_tokens=7, stop=("end",))
    by_record = verl.Actor(model, train=train, rollout=rollout, seed=5)
    by_keyword = verl.Actor(
        str(tiny),
        dtype="bfloat16",
        gradient_checkpointing=True,
        optim={"lr": 1e-3},
        mini_batch_size=4,
        epochs=2,
        train_micro_batch_size_per_gpu=1,
        rollout="hf",
        max_num_seqs=3,
        kv_cache_gb=0.5,
        sampling={"max_new_tokens": 7, "stop": ["end"]},
        seed=5,
    )
    assert by_record.sampling == by_keyword.sampling == verl.SamplingParams(max_new_tokens=7, stop=("end",))
    for name in ("name", "max_num_seqs", "kv_memory", "seed", "episode", "batch_invariant"):
        assert getattr(by_record.rollout_options, name) == getattr(by_keyword.rollout_options, name)
    assert by_record.train_options == by_keyword.train_options
    assert by_record.train_options.optim.lr == 1e-3 and by_record.train_options.gradient_checkpointing
    assert by_record.plan == by_keyword.plan and by_record.plan.mini_batch_size == 4
    assert by_record.model.dtype == by_keyword.model.dtype == torch.bfloat16


def test_responses_that_the_model_cannot_finish_are_mentioned(
    actor: verl.Actor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    actor.generate_sequences(["One"], max_new_tokens=2)
    assert not caplog.records
    positions = actor.model.config.max_position_embeddings
    prompt = [5] * (positions - 2)
    done = actor.generate_sequences([prompt], max_new_tokens=4)
    assert len(done["response_tokens"][0]) <= 2
    assert f"end before max_new_tokens=4: the model has {positions} positions" in caplog.text


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_no_response_is_cut_at_the_original_length_without_a_word(
    engine: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = {"vocab_size": 300, "bos_token_id": 299, "eos_token_id": 299, "pad_token_id": 299}
    make: Any = Phi3Config if kind == "longrope" else LlamaConfig
    config = make(**tokens, **sizes, max_position_embeddings=128, rope_parameters=rope)
    config.rope_parameters["original_max_position_embeddings"] = config.original_max_position_embeddings = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    actor = verl.Actor(model, byte_tokenizer(), rollout=engine)
    caplog.set_level(logging.WARNING)
    (response,) = actor.generate_sequences([[5] * 8], max_new_tokens=6)["response_tokens"]
    assert "end before" not in caplog.text
    (response,) = actor.generate_sequences([[5] * 8], max_new_tokens=20)["response_tokens"]
    is_cut = len(response) < 20 and 299 not in response and 0 not in response
    assert is_cut == (engine == "embedded")
    said = "the model has 16 positions (original_max_position_embeddings)" in caplog.text
    assert said == is_cut


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_a_base_model_stops_where_its_chat_template_ends_a_reply(engine: str, tmp_path: Path) -> None:
    """Its EOS is another token, and nothing but the template names this one: what is trained, generation and exports
    agree on it."""
    family = FAMILIES["chatml of a base model"]
    tokenizer = family.make()
    eos, end = (tokenizer.convert_tokens_to_ids(name) for name in (family.eos, family.last))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=eos, bos_token_id=None, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    actor = verl.Actor(model, tokenizer, rollout=engine)
    assert actor.ends == (eos, end)
    chat = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}]
    (trained,) = verl.OfflineDatasetLoader([{"messages": chat}], tokenizer).batch["response_tokens"]
    assert trained[-1] == end
    samples = actor.generate_sequences(["two"] * 8, n=4, max_new_tokens=100)
    stopped = [tokens for tokens, finish in zip(samples["response_tokens"], samples["finish"], strict=True)
               if finish == "stop"]  # fmt: skip
    assert {tokens[-1] for tokens in stopped} == {eos, end}
    assert not {eos, end} & {token for tokens in samples["response_tokens"] for token in tokens[:-1]}
    assert not any(name in text for text in samples["response"] for name in (family.eos, family.last))
    actor.save_pretrained(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [eos, end]
    assert load_model(tmp_path / "out").generation_config.eos_token_id == [eos, end]
