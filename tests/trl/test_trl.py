"""TRL's names over our trainer: a script of TRL's with its import line changed, every trainer, callbacks, arguments."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import verl
from verl.errors import ConfigError
from verl.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from verl.trl.arguments import Config
from verl.trl.losses import dpo_algorithm
from verl.weights.shard import checksum

SCRIPT = Path(__file__).parent / "grpo_script.py"
PEER = Path(__file__).parents[2] / ".bench" / "trl" / "bin" / "python"
PROMPTS = [{"prompt": f"Say {number}: "} for number in range(8)]
PAIRS = [{"prompt": f"Say {i}: ", "chosen": "aaaa", "rejected": "zzzz zz"} for i in range(8)]
LABELS = [{"prompt": f"Say {i}: ", "completion": "aaaa" if i % 2 else "zzzz", "label": bool(i % 2)} for i in range(8)]
TURNS = [{"prompt": f"Say {i}: ", "completion": "aaaa"} for i in range(8)]
SMALL = {"learning_rate": 3e-3, "save_strategy": "no", "lr_scheduler_type": "constant", "logging_steps": 1}


def low_bytes(completions: list[str], **columns: Any) -> list[float]:
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in completions]


def grpo(model: Any, folder: Path, reward: Any = low_bytes, given: dict[str, Any] | None = None, **more: Any) -> Any:
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    args = GRPOConfig(output_dir=str(folder), **SMALL | options | (given or {}))
    return GRPOTrainer(model, reward, args, PROMPTS, **more)


def test_a_script_of_trl_runs_with_its_import_line_changed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("from trl import", "from verl.trl import"))
    if find_spec("datasets") is None:  # its Dataset has a length and rows, as a list has
        (tmp_path / "datasets.py").write_text("class Dataset:\n    from_list = staticmethod(list)\n")
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MODEL", str(tiny))
    monkeypatch.setenv("OUTPUT", str(tmp_path / "out"))
    found = runpy.run_path(str(script))
    assert found["watch"].steps == found["result"].global_step == 3 and len(found["watch"].rewards) == 3
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    parts = [(r["reward/format_reward/mean"], r["reward/accuracy_reward/mean"], r["reward/mean"]) for r in records]
    assert all(mean == pytest.approx(0.25 * first + second) for first, second, mean in parts)
    assert records[0]["kl"] == pytest.approx(0, abs=1e-9) and all("loss/kl" in record for record in records)
    assert [record["lr/actor"] for record in records] == pytest.approx([0, 5e-3, 2.5e-3])
    assert {path.name for path in (tmp_path / "out").glob("step-*")} == {"step-000002", "step-000003"}
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    first = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    assert any(not torch.equal(trained[name], weight) for name, weight in first.items())


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl")
def test_the_script_is_one_that_trl_runs(tiny: Path, tmp_path: Path) -> None:
    env = {**os.environ, "MODEL": str(tiny), "OUTPUT": str(tmp_path / "out"), "PYTHONPATH": ""}
    done = subprocess.run([PEER, SCRIPT], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert "steps 3 3 logged rewards 3" in done.stdout, done.stderr[-2000:]


def test_names_of_trl(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the names that a migration needs does what it says."""
    from peft import LoraConfig

    trainer = grpo(str(tiny), tmp_path / "grpo", given={"beta": 0.1, "report_to": "tensorboard"},
                   peft_config=LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    options = trainer.actor.train_options
    done = {
        "GRPOTrainer": trainer.trainer.algorithm.name == "grpo",
        "learning_rate": options.optim.lr == 3e-3,
        "num_generations": trainer.trainer.n == 2,
        "beta": trainer.trainer.algorithm.kl_coef == 0.1,
        "report_to": any((tmp_path / "grpo" / "tensorboard").iterdir()),
        "peft_config": trainer.actor.base is not None,
        "train": trainer.trainer.steps == 2,
        "save_model": (tmp_path / "saved" / "adapter_model.safetensors").exists(),
    }
    for kind, config, data in OFFLINE:
        made = kind(str(tiny), args=config(str(tmp_path / kind.__name__), **SMALL, num_train_epochs=1),
                    train_dataset=data)  # fmt: skip
        before = made.evaluate(data)["eval_loss"]
        made.train()
        done[kind.__name__] = made.evaluate(data)["eval_loss"] < before
    missing = [name for name, ok in done.items() if not ok]
    with capsys.disabled():
        print(f"\nTRL names {len(done) - len(missing)} of {len(done)}")
    assert len(done) == 12 and not missing


OFFLINE: list[tuple[Any, Any, Any]] = [
    (DPOTrainer, DPOConfig, PAIRS),
    (SFTTrainer, SFTConfig, TURNS),
    (KTOTrainer, KTOConfig, LABELS),
    (RewardTrainer, RewardConfig, PAIRS),
]


@pytest.mark.slow
def test_both_scripts_of_the_page_train_the_same_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "from_trl.md").read_text()
    sums = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:]):
        script = tmp_path / f"script_{number}.py"
        script.write_text(block.replace("64", "8").replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny)))
        sums.append(checksum(runpy.run_path(str(script))["trainer"].actor.shards()))
        assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    first = verl.Actor(str(tiny))
    assert len(sums) == 2 and sums[0] == sums[1] != checksum(first.shards())


LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_pairs_are_learned(tiny: Path, tmp_path: Path, loss: str) -> None:
    smoothing = {"label_smoothing": 0.01} if loss in ("exo_pair", "robust") else {}
    args = DPOConfig(str(tmp_path), **SMALL, num_train_epochs=2, loss_type=[loss], **smoothing)
    trainer = DPOTrainer(str(tiny), args=args, train_dataset=PAIRS)
    before = trainer.evaluate(PAIRS)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(PAIRS)["eval_loss"] < before


def test_losses_of_pairs_that_there_are_not(tmp_path: Path) -> None:
    for given, message in (
        ({"loss_type": "aot_unpaired"}, "loss_type='aot_unpaired': it is not here: loss_type='aot' sorts"),
        ({"loss_type": "sigmoids"}, "loss_type='sigmoids': did you mean 'sigmoid'"),
        ({"loss_type": ["sigmoid", "sft"]}, "one loss is trained"),
        ({"label_smoothing": 0.1}, "set loss_type='robust'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dpo_algorithm(DPOConfig(str(tmp_path), **given))


class Stop(TrainerCallback):
    """Ends the run after so many steps, and notes what it is called for."""

    def __init__(self, after: int) -> None:
        self.after, self.events = after, []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        assert model is not None and args.learning_rate == 3e-3
        self.events.append("begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = state.global_step >= self.after
        control.should_save = state.global_step == 1
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.events.append("log" if "loss" in logs else "summary" if "train_loss" in logs else "eval log")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("save")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        assert "eval_reward" in metrics
        self.events.append("evaluate")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("end")


def test_callbacks_see_the_run_and_end_it(tiny: Path, tmp_path: Path) -> None:
    stop = Stop(2)
    given = {"max_steps": 9, "save_strategy": "steps", "save_steps": 9}
    trainer = grpo(str(tiny), tmp_path, given=given, callbacks=[stop])
    result = trainer.train()
    assert result.global_step == trainer.state.global_step == 2 and trainer.state.max_steps == 9
    assert stop.events == ["begin", "step", "log", "save", "step", "log", "save", "summary", "end"]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 2]
    again = grpo(str(tiny), tmp_path, given=given | {"max_steps": 3})
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert [entry["step"] for entry in again.state.log_history] == [3, 3]


@pytest.mark.parametrize("streamed", [False, True])
def test_long_prompts_keep_their_end(tiny: Path, tmp_path: Path, streamed: bool) -> None:
    lengths: list[int] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        lengths.extend(map(len, prompts))
        return low_bytes(completions)

    args = GRPOConfig(str(tmp_path), **SMALL, per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
                      max_steps=1, max_prompt_length=3, use_cpu=True)  # fmt: skip
    trainer = GRPOTrainer(str(tiny), reward, args, iter_of(PROMPTS) if streamed else PROMPTS)
    trainer.train()
    prompts = next(trainer.loader)
    assert prompts.lengths("prompt_tokens") == [3, 3] and len(lengths) == 4
    assert trainer.processing_class.decode(prompts["prompt_tokens"][0]).endswith(": ")


class iter_of:  # noqa: N801 - rows without a length
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_evaluation(tiny: Path, tmp_path: Path) -> None:
    watch = Stop(99)
    given = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = grpo(str(tiny), tmp_path, given=given, callbacks=[watch], eval_dataset=PROMPTS[:2])
    trainer.train()
    assert watch.events.count("evaluate") == 2, "before the first step, and after the last"
    assert 0 <= trainer.evaluate()["eval_reward"] <= 1


def test_training_arguments_of_transformers(tiny: Path, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), learning_rate=3e-3, per_device_train_batch_size=4, max_steps=1, lr_scheduler_type="constant"
    )
    seen = []

    class See(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append(args)

    trainer = SFTTrainer(str(tiny), args, train_dataset=TURNS, callbacks=[See])
    trainer.train()
    assert seen == [args] and trainer.loader.batch_size == 4
    optim = trainer.actor.train_options.optim
    assert (optim.lr, optim.schedule(5), optim.adam_eps, optim.max_grad_norm) == (3e-3, 1, 1e-8, 1.0)
    with pytest.raises(ConfigError, match="load_best_model_at_end=True is not done here: checkpoints of all steps"):
        SFTTrainer(
            str(tiny),
            TrainingArguments(str(tmp_path), load_best_model_at_end=True, eval_strategy="steps", eval_steps=500),
            train_dataset=TURNS,
        )


def test_a_rollout_of_several_optimizer_steps(tiny: Path, tmp_path: Path) -> None:
    given = {"generation_batch_size": 8, "num_iterations": 2, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    trainer = grpo(str(tiny), tmp_path, given=given | {"save_total_limit": 1})
    assert trainer.train().global_step == 8 and trainer.trainer.steps == 2
    assert trainer.actor.plan.mini_batch_size == 4 and trainer.actor.plan.epochs == 2
    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-8") and Path(last).resolve() == tmp_path / "step-000002"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"], "the first one is gone"
    again = grpo(str(tiny), tmp_path, given=given | {"max_steps": 12})
    assert again.train(resume_from_checkpoint=last).global_step == 12


@pytest.mark.reward_processes
def test_a_reward_sees_the_state_of_its_step(tiny: Path, tmp_path: Path) -> None:
    def step(completions: list[str], trainer_state: Any) -> list[float]:
        return [trainer_state.global_step + i % 2 for i in range(len(completions))]

    trainer = grpo(str(tiny), tmp_path, [step])
    trainer.train()
    assert [logs["reward"] for logs in trainer.state.log_history[:2]] == [0.5, 1.5]


def test_rewards_get_the_state_and_may_abstain(tiny: Path, tmp_path: Path) -> None:
    steps: list[int] = []

    def some(completions: list[str], trainer_state: Any, **columns: Any) -> list[float | None]:
        steps.append(trainer_state.global_step)
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    trainer = grpo(str(tiny), tmp_path, [some, low_bytes])
    trainer.train()
    assert steps == [0, 1]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(record["abstained"] == 0 for record in records), "a sum over the rewards that there are"
    logged = trainer.state.log_history[0]
    parts = {f"rewards/{name}/{of}" for name in ("some", "low_bytes") for of in ("mean", "std")}
    assert {name for name in logged if name.startswith("rewards/")} == parts
    assert logged["rewards/some/mean"] == 1.0 and logged["reward"] == records[0]["reward/mean"]
    assert {"loss", "grad_norm", "learning_rate", "completions/mean_length", "epoch", "step"} <= logged.keys()


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (GRPOConfig, {"learning_rte": 1}, "GRPOConfig has no argument 'learning_rte': did you mean 'learning_rate'"),
        (GRPOConfig, {"max_new_tokens": 9}, "has no argument 'max_new_tokens': it is max_completion_length"),
        (GRPOConfig, {"fp16": True}, "fp16=True is not done here: use bf16=True"),
        (DPOConfig, {"loss_weights": [1.0]}, "loss_weights=.* one loss is trained"),
        (SFTConfig, {"num_generations": 4}, "SFTConfig has no argument 'num_generations'"),
    ],
)
def test_unknown_arguments(config: type[Config], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config("out", **given)


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({}, {"tokenizer": 1}, "GRPOTrainer has no argument 'tokenizer': it is processing_class"),
        ({}, {"data_collator": 1, "compute_metrics": None}, "no argument 'data_collator': rows are packed"),
        ({}, {"reward_func": 1}, "GRPOTrainer has no argument 'reward_func': did you mean 'reward_funcs'"),
        ({"num_generations": 3}, {}, "which num_generations=3 does not divide"),
        ({"loss_type": "sapoo"}, {}, "loss_type='sapoo': did you mean 'sapo'"),
        ({"loss_type": "vespo", "epsilon": 0.3}, {}, "epsilon=0.3 is not read with loss_type='vespo'"),
        ({"loss_type": "vespo", "sapo_temperature_neg": 2.0}, {}, "sapo_temperature_neg=2.0 is not read with"),
        ({"report_to": "wandbb"}, {}, "report_to='wandbb': did you mean 'wandb'"),
        ({"optim": "adafactr"}, {}, "optim='adafactr': did you mean 'adafactor'"),
        ({"lr_scheduler_type": "cosin"}, {}, "lr_scheduler_type='cosin': did you mean 'cosine'"),
        ({"entropy_coef": 0.1, "loss_type": "grpo"}, {}, "entropy_coef with loss_type='grpo'"),
        ({}, {"callbacks": [print]}, "a callback is a transformers.TrainerCallback"),
    ],
)
def test_bad_arguments(tiny: Path, tmp_path: Path, given: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo(str(tiny), tmp_path, given=given, **more)


def test_a_live_model_and_an_optimizer_of_the_callers(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = grpo(model, tmp_path, processing_class=tokenizer, optimizers=(optimizer, schedule))
    trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025) and trainer.model is model
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, schedule)
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not PEER.exists(), reason="needs TRL: benchmarks/peer_env.sh trl")
def test_every_argument_of_trl_is_known(tmp_path: Path) -> None:
    """Mapped, without effect, or done otherwise: none is a misspelling; and defaults that are mapped are TRL's."""
    code = (
        "import dataclasses, json, trl;"
        "print(json.dumps({n: {f.name: (f.default if isinstance(f.default, (int, float, str, bool, type(None))) else 0)"
        " for f in dataclasses.fields(getattr(trl, n))} for n in"
        " ('GRPOConfig', 'DPOConfig', 'SFTConfig', 'KTOConfig', 'RewardConfig')}))"
    )
    done = subprocess.run([PEER, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for config in (GRPOConfig, DPOConfig, SFTConfig, KTOConfig, RewardConfig):
        known = {field.name for field in dataclasses.fields(config)}
        assert theirs[config.__name__].keys() - known == set(), config.__name__
        differ = {name for name, value in config.defaults().items()
                  if name in theirs[config.__name__] and theirs[config.__name__][name] != value}  # fmt: skip
        assert differ <= {"gradient_checkpointing", "report_to", "optim", "loss_type"}, (config.__name__, differ)


def test_what_scripts_read_of_a_trainer(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries of the log, files of metrics, Accelerate's names, several evaluation sets."""
    args = SFTConfig(str(tmp_path), **SMALL | {"logging_steps": 2}, max_steps=3)
    trainer = SFTTrainer(str(tiny), args=args, train_dataset=TURNS, eval_dataset={"a": TURNS[:4], "b": TURNS[4:]})
    assert trainer.lr_scheduler.get_last_lr() == [trainer.optimizer.param_groups[0]["lr"]] == [3e-3]
    result = trainer.train()
    assert trainer.optimizer.param_groups[0]["params"] == list(trainer.model.parameters())
    assert trainer.hub_model_id is None and trainer.end() is None
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 3]
    assert history[-1]["train_loss"] == result.training_loss == result.metrics["train_loss"] > 0
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} <= history[-1].keys()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert history[0]["loss"] == pytest.approx((records[0]["loss/actor"] + records[1]["loss/actor"]) / 2)
    assert history[0]["grad_norm"] == pytest.approx(records[1]["grad_norm/actor"])
    evaluated = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= evaluated.keys()
    assert evaluated["eval_a_samples_per_second"] == pytest.approx(4 / evaluated["eval_a_runtime"], rel=0.02)
    trainer.accelerator.print("hello")
    trainer.log_metrics("train", result.metrics)
    assert {"hello", "train_loss"} <= set(capsys.readouterr().out.split())
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    assert (tmp_path / "train_results.json").exists() and (tmp_path / "trainer_state.json").exists()
    assert len(trainer.train_dataset) == len(TURNS) and trainer.get_train_dataloader() is trainer.loader
    with pytest.raises(ConfigError, match="push_to_hub: nothing is uploaded here"):
        trainer.push_to_hub()


def test_a_reward_function_may_log_a_metric_and_the_template_gets_its_variables(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{{ style }}" + tokenizer.chat_template
    seen: list[Any] = []

    def logged(
        completions: list[Any], log_metric: Any, log_extra: Any, trainer_state: Any, **columns: Any
    ) -> list[float]:
        seen.append(trainer_state.global_step)
        log_metric("letters", float(trainer_state.global_step))
        log_extra("text", completions)
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": f"Say {i}"}]} for i in range(4)]
    args = GRPOConfig(str(tmp_path), **SMALL, per_device_train_batch_size=4, num_generations=2, max_completion_length=4,
                      max_steps=2, chat_template_kwargs={"style": "calm "})  # fmt: skip
    trainer = GRPOTrainer(str(tiny), logged, args, rows, processing_class=tokenizer)
    drawn = next(iter(trainer.loader))
    assert all(json.loads(options) == {"style": "calm "} for options in drawn["chat_template_kwargs"])
    trainer.train()
    assert [entry["letters"] for entry in trainer.state.log_history if "letters" in entry] == [0.0, 1.0] == seen
