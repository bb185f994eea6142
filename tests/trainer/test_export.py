"""The way of a trained model out of a run: a directory that everything else reads."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import verl
from tests.tensor_memory import is_mapped
from tests.trainer.runs import run_dir, settings
from tests.trainer.test_offline import loader, offline_trainer
from tests.trainer.test_state import reforge
from verl.checkpoint.store import load_checkpoint, save_checkpoint
from verl.checkpoint.verify import rebuild, verify
from verl.cli.main import app
from verl.config import build_config
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models.loading import load_model, load_tokenizer
from verl.rollout.environments import EnvironmentEpisode
from verl.run.export import export
from verl.run.train import train
from verl.weights.shard import checksum
from verl.weights.shards import model_shards

SHORT = {"trainer.total_steps": 2, "trainer.save_every": 1, "trainer.eval_every": None}
RUNNER = CliRunner()


def finished(tmp_path: Path, model: Path, **changes: Any) -> Path:
    train(build_config(settings(tmp_path, model, **SHORT, **changes)))
    return run_dir(tmp_path)


def weights(path: Path) -> str:
    return checksum(model_shards(load_model(path)))


def test_a_run_ends_with_the_command_that_exports_its_model(
    tmp_path: Path, make_tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("llama", torch.bfloat16)
    run = finished(tmp_path, model, **{"actor_rollout_ref.model.dtype": "bfloat16"})
    assert f"verl export {run} OUT" in capsys.readouterr().out
    for number, path in enumerate((run, tmp_path / "runs" / "latest", run / "checkpoints" / "latest")):
        done = RUNNER.invoke(app, ["export", str(path), str(tmp_path / "out" / str(number))])
        assert done.exit_code == 0, done.output
        assert "step 2 of" in done.stderr and done.stdout.strip() == str(tmp_path / "out" / str(number))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0", "1", "2"]
    out = tmp_path / "out" / "0"
    # The very tensors that a trainer goes on from, in its own export.
    trainer = verl.Trainer(
        verl.Actor(str(model), dtype="bfloat16"), reward_fn=len, algorithm="grpo", n=4, log_dir=False
    )
    trainer.load_checkpoint(run / "checkpoints" / "latest")
    trainer.actor.save_pretrained(str(tmp_path / "own"))
    assert weights(out) == weights(tmp_path / "own") != weights(model)
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "own").iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == trainer.actor.model.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(out).chat_template == trainer.actor.tokenizer.chat_template


@pytest.mark.slow
def test_the_model_is_not_built_a_second_time(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    checkpoint = load_checkpoint(run / "checkpoints" / "latest")
    model, fault = rebuild(checkpoint)
    assert fault is None
    large = [weight for weight in model.parameters() if weight.nbytes >= 4096]
    assert large and all(is_mapped(weight.untyped_storage()) for weight in large)  # no copies of the files


def test_a_reward_model_is_exported_with_its_head(tiny: Path, tmp_path: Path) -> None:
    trainer, data = offline_trainer(tiny, "reward_model"), loader(tiny, "reward_model")
    trainer.step(next(data))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out")
    scores = verl.Reward(model=str(tmp_path / "out")).get_reward(data.batch)["reward"]
    trainer.actor.save_pretrained(str(tmp_path / "own"))
    assert scores == verl.Reward(model=str(tmp_path / "own")).get_reward(data.batch)["reward"]


def test_what_cannot_be_exported_is_told_and_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    out = tmp_path / "out"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for path, to, error, words in (
        (run, tmp_path / "taken", ConfigError, "is there already and not empty"),
        (run, run / "checkpoints" / "step-000002" / "model", ConfigError, "lies in the checkpoint"),
        (tmp_path / "absent", out, CheckpointError, "nothing is there"),
        (tmp_path / "taken", out, CheckpointError, "neither a checkpoint nor a run"),
    ):
        with pytest.raises(error, match=words):
            export(path, to)
    with pytest.raises(ModelError, match="taken has no tokenizer"):
        export(run, out, tokenizer=str(tmp_path / "taken"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"was not written: .* free space or name another directory"):
            export(run, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists() and not list(tmp_path.glob(".staging-*"))
    (run / "checkpoints" / "step-000002" / "trainer.json").write_text("{}")
    assert export(run, out).step == 1  # the newest that is whole


def test_a_model_that_does_not_answer_as_it_did_is_not_exported(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    found = load_checkpoint(run / "checkpoints" / "latest")
    files = {name: found.json(name) for name in ("actor/config.json", "actor/probe.json")}
    wrong = {name: tensor + 0.01 for name, tensor in found.tensors("actor/weights").items()}
    assert save_checkpoint(tmp_path / "wrong", 2, {**files, "actor/weights": wrong})
    with pytest.raises(CheckpointError, match="outputs differ"):
        export(tmp_path / "wrong", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_newest_checkpoint_with_malformed_content_is_passed_over(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    newest = run / "checkpoints" / "step-000002"
    weights = {shard.name: shard.tensor.long() for shard in load_checkpoint(newest).shards("actor/weights")}
    changes = {
        "actor/weights-0-00001.safetensors": safetensors(weights),
        "actor/config.json": b"[" * 200_000,
        "actor/probe.json": b'{"outputs": 1}',
        "trainer.json": b"[]",
    }
    for number, (name, raw) in enumerate(changes.items()):
        good = (newest / name).read_bytes()
        reforge(newest, name, raw)
        assert not verify(newest).ok
        if name != "trainer.json":
            assert export(run, tmp_path / str(number)).step == 1
            with pytest.raises(CheckpointError, match="step-000002 is damaged"):
                export(newest, tmp_path / "out")
        reforge(newest, name, good)
    assert verify(newest).ok and export(run, tmp_path / "good").step == 2


@pytest.mark.slow
def test_a_checkpoint_given_as_a_model_names_the_command(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    step = run / "checkpoints" / "step-000002"
    (tmp_path / "prompts.txt").write_text("hello\n")
    for path, named in ((run, run), (step, step), (step / "actor", step)):
        command = ["generate", str(path), str(tmp_path / "prompts.txt"), str(tmp_path / "out.jsonl")]
        done = RUNNER.invoke(app, command)
        assert done.exit_code == 1
        assert f"verl export {named} OUT" in done.stderr


@pytest.mark.slow
def test_a_trainer_goes_on_from_a_checkpoint_of_the_command(tmp_path: Path, tiny: Path) -> None:
    run = finished(tmp_path, tiny)
    trainer = verl.Trainer(str(tiny), reward_fn=len, algorithm="grpo", n=4, log_dir=False)
    trainer.load_checkpoint(run / "checkpoints" / "latest")
    assert trainer.steps == 2
    with pytest.raises(CheckpointError, match="algorithm is 'grpo' there and 'rloo' here"):
        verl.Trainer(str(tiny), reward_fn=len, algorithm="rloo", n=4, log_dir=False).load_checkpoint(
            run / "checkpoints" / "latest"
        )


OTHER = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("source", ["python", "episode", "none"])
def test_the_chat_template_and_tokens_of_training_leave_with_the_model(tmp_path: Path, tiny: Path, source: str) -> None:
    tokenizer, episode = load_tokenizer(str(tiny)), None
    if source == "none":
        tokenizer.chat_template = None
    else:
        tokenizer.chat_template = OTHER
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    if source == "episode":
        (tmp_path / "template.jinja").write_text(OTHER.replace("[{{", "<{{").replace("}}]", "}}>"))
        episode = EnvironmentEpisode(Echo, chat_template=str(tmp_path / "template.jinja"))
    model = load_model(tiny)
    model.resize_token_embeddings(len(tokenizer))
    actor = verl.Actor(model, tokenizer, episode=episode, sampling={"max_new_tokens": 3})
    trainer = verl.Trainer(actor, reward_fn=len, algorithm="grpo", n=2, log_dir=False)
    trainer.save_checkpoint(tmp_path / "saved")
    assert verify(tmp_path / "saved").ok
    done = RUNNER.invoke(app, ["export", str(tmp_path / "saved"), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    actor.save_pretrained(tmp_path / "written")
    chat = [{"role": "user", "content": "two?"}]
    for folder in ("exported", "written"):
        again = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert len(again("<call>", add_special_tokens=False)["input_ids"]) == 1
        if source == "none":
            assert again.chat_template is None
            continue
        text = again.apply_chat_template(chat, tokenize=False)
        assert text == ("<user> two?\n" if source == "episode" else "[user] two?\n")


class Echo:
    def reset(self, **row: Any) -> str:
        return "go"

    def get_reward(self) -> float:
        return 1.0
