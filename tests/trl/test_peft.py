"""`peft_config`, and the model that a script has of a trainer: peft's over what is trained, saved as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.trl.test_trl import PAIRS, SMALL, TURNS
from verl.errors import ConfigError
from verl.trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        values: Tensor = model.eval()(input_ids=torch.arange(5, 25).view(1, -1)).logits
    return values


def trained(kind: Any, model: Any, folder: Path, resume: str | None = None, **more: Any) -> Any:
    """A trainer after four steps, saved to `folder / "saved"`."""
    config, rows = (RewardConfig, PAIRS) if kind is RewardTrainer else (SFTConfig, TURNS)
    args = config(str(folder), **SMALL | {"save_strategy": "steps", "save_steps": 2}, max_steps=4)
    trainer = kind(model, args=args, train_dataset=rows, **more)
    before = logits(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    assert not torch.equal(before, logits(trainer.model))
    trainer.save_model(folder / "saved")
    return trainer


@pytest.mark.parametrize(
    "form",
    [
        {"target_modules": ["q_proj", "up_proj"]},
        pytest.param({"use_dora": True, "task_type": "CAUSAL_LM"}, marks=pytest.mark.slow),
        pytest.param({"use_rslora": True, "rank_pattern": {"v_proj": 3}}, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_adapters_is_that_of_peft(tiny: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    trainer = trained(SFTTrainer, str(tiny), tmp_path, peft_config=LoraConfig(r=2, **form))
    assert isinstance(trainer.model, PeftModel)
    trainer.model.save_pretrained(tmp_path / "by_peft")
    for folder in ("saved", "by_peft"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / folder)
        assert torch.equal(logits(loaded), logits(trainer.model)), folder
    checkpoint = tmp_path / "step-000002"
    assert sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) < 100_000, (
        "its base is not in it"
    )
    again = trained(SFTTrainer, str(tiny), tmp_path, str(checkpoint), peft_config=LoraConfig(r=2, **form))
    assert torch.equal(logits(again.model), logits(trainer.model))


def test_a_reward_model_is_a_classifier(tiny: Path, tmp_path: Path) -> None:
    trainer = trained(RewardTrainer, str(tiny), tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(trainer.model))
    again = trained(RewardTrainer, loaded, tmp_path / "again", processing_class=AutoTokenizer.from_pretrained(tiny))
    assert again.model is loaded


def test_the_head_of_a_reward_model_is_trained_and_saved_with_its_adapters(tiny: Path, tmp_path: Path) -> None:
    trainer = trained(RewardTrainer, str(tiny), tmp_path, peft_config=LoraConfig(r=2, task_type="SEQ_CLS"))
    assert isinstance(trainer.model, PeftModel)
    base = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(trainer.model))
    head = loaded.get_base_model().score.modules_to_save["default"].weight
    assert head.any() and torch.equal(head, trainer.actor.modules.score.weight)


def test_a_frozen_head_of_a_reward_model_stays_as_it_is(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    head = model.score.weight.detach().clone()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    trainer = trained(RewardTrainer, model, tmp_path, processing_class=tokenizer, peft_config=LoraConfig(r=2))
    assert torch.equal(trainer.model.get_base_model().score.weight, head)
    assert torch.equal(trainer.actor.modules.score.weight, head)


def test_adapters_that_cannot_be_trained(tiny: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for kind, model, config, message in (
        (SFTTrainer, adapted, LoraConfig(r=2), "the model has adapters already"),
        (
            SFTTrainer,
            str(tiny),
            PromptTuningConfig("CAUSAL_LM"),
            "PromptTuningConfig: prompt-learning is not computed",
        ),
        (
            SFTTrainer,
            str(tiny),
            LoraConfig(target_modules=["q_prj"]),
            "peft_config.target_modules: the model has no 'q_prj'",
        ),
        (RewardTrainer, str(tiny), LoraConfig(r=2), "the head is a new one, which is trained with task_type='SEQ_CLS'"),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(kind, model, tmp_path, processing_class=tokenizer, peft_config=config)
