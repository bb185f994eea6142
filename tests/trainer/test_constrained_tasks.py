"""A task that samples under a constraint, beside others that do not, and what learns from it."""

from __future__ import annotations

import pickle
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import verl
from tests.trainer.cases import PROMPTS, SHORT, collected, low_bytes
from verl.algorithms import make_algorithm
from verl.errors import ConfigError, ModelError
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.guards import TEMPLATE, GuardModel
from verl.trainer.task import Task
from verl.trainer.tasks import make_constraint
from verl.weights.shard import checksum


def begins_low(text: str, row: Mapping[str, Any]) -> bool:
    return text[:1] < "d"


async def ends_low(text: str, row: Mapping[str, Any]) -> bool:
    return text[-1:] < "d"


def actor(path: Path, **options: Any) -> verl.Actor:
    return verl.Actor(str(path), optim={"lr": 1e-2}, sampling=SHORT, **options)


def constrained(accept: Any = begins_low, tries: int = 2, **options: Any) -> Task:
    episode = ConstrainedEpisode(accept=accept, max_resamples=tries)
    return Task("held", make_algorithm("constrained_decoding", **options), n=4, episode=episode)


def test_a_constraint_is_of_its_own_task_alone(tiny: Path) -> None:
    seen: dict[bool, list[Any]] = {}

    def reward(completions: list[str]) -> list[float]:
        return low_bytes(completions)

    for with_one in (False, True):
        episode = ConstrainedEpisode(accept=ends_low, max_resamples=3) if with_one else None
        free = Task("free", "grpo", {"reward": reward}, n=2)
        tasks = [free, Task("held", "grpo", {"reward": reward}, n=4, episode=episode)]
        trainer = verl.Trainer(actor(tiny), tasks=tasks, log_dir=False)
        parts = {name: collected(trainer, PROMPTS, f"s0.{name}", name) for name in trainer.tasks}
        record = trainer.tasks["held"].record(parts["held"])
        seen[with_one] = parts["free"].rows["response_tokens"]
        assert "rejected" not in parts["free"].rows
        assert (record.get("rollout/rejection_rate", 0.0) > 0) == with_one
        if with_one:
            rows = parts["held"].rows
            assert all(r[-1:] < "d" for r, f in zip(rows["response"], rows["finish"], strict=True) if f != "reject")
            assert [reward is None for reward in rows["reward"]] == [finish == "reject" for finish in rows["finish"]]
            record = trainer.step({"free": PROMPTS, "held": PROMPTS})
            assert record["task/held/rejection_rate"] > 0 and record["task/free/rejection_rate"] == 0
    assert seen[True] == seen[False]


def test_what_holds_is_learned_by_likelihood_and_nothing_else_is(tiny: Path) -> None:
    trainer = verl.Trainer(actor(tiny), tasks=[constrained()], log_dir=False)
    drawn = collected(trainer, PROMPTS).rows
    holds = [finish != "reject" for finish in drawn["finish"]]
    assert 0 < sum(holds) < len(holds)
    record = trainer.step(PROMPTS)
    assert record["constraint/accepted"] == sum(holds) / len(holds)
    plain = actor(tiny)
    plain.train(drawn.filter(holds), make_algorithm("sft"))
    assert checksum(plain.shards()) == checksum(trainer.actor.shards())


def test_without_learning_the_constraint_acts_and_the_weights_stay(tiny: Path) -> None:
    trainer = verl.Trainer(actor(tiny), tasks=[constrained(learn=False)], log_dir=False)
    before = checksum(trainer.actor.shards())
    record = trainer.step(PROMPTS)
    assert not record["updated"] and record["rollout/rejection_rate"] > 0
    assert checksum(trainer.actor.shards()) == before


def rejections(path: Path, lr: float, steps: int) -> float:
    """Mean share of rejected responses in the last four steps of a run."""
    made = verl.Actor(str(path), optim={"lr": lr}, sampling=SHORT)
    trainer = verl.Trainer(made, tasks=[constrained(ends_low, 3)], log_dir=False)
    return statistics.fmean([trainer.step(PROMPTS * 4)["rollout/rejection_rate"] for _ in range(steps)][-4:])


@pytest.mark.slow
def test_it_learns_to_keep_to_the_constraint_and_a_control_does_not(tiny: Path) -> None:
    learned, control = rejections(tiny, 3e-2, 16), rejections(tiny, 0.0, 4)
    assert learned < 0.25 < 0.45 < control


def test_a_constraint_is_needed_and_a_reward_is_measured(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="task 'main': algorithm 'constrained_decoding' samples under a constraint"):
        verl.Trainer(actor(tiny), algorithm="constrained_decoding", log_dir=False)
    episode = ConstrainedEpisode(accept=begins_low)
    played = actor(tiny, episode=episode)
    trainer = verl.Trainer(played, reward_fn=low_bytes, algorithm="constrained_decoding", log_dir=False)
    assert trainer.step(PROMPTS)["reward/mean"] > 0
    used = actor(tiny)
    used.generate_sequences(PROMPTS)
    with pytest.raises(ConfigError, match="give task 'held' its episode before the first call"):
        verl.Trainer(used, tasks=[constrained()], log_dir=False)


def save_classifier(tiny: Path, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(path)
    return path


def test_a_classifier_judges(tiny: Path, tmp_path: Path) -> None:
    path = save_classifier(tiny, tmp_path / "classifier")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    texts = [f"text {number}" for number in range(8)]
    asked = [TEMPLATE.replace("{prompt}", "Why?").replace("{response}", text) for text in texts]
    with torch.inference_mode():
        scores = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in asked]
    middle = statistics.median(scores)
    guard = pickle.loads(pickle.dumps(GuardModel(str(path), template=TEMPLATE, minimum=middle)))
    assert [guard.judge("Why?", text) for text in texts] == [score >= middle for score in scores]


def test_a_language_model_writes_its_verdict(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    tokens = tokenizer("Is this so? good", return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=4, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    first = re.findall(r"[^\W_]+", tokenizer.decode(written))[0]
    options: dict[str, Any] = {"max_new_tokens": 4, "template": "Is this so? {response}"}
    # One whose tokenizer ends each text is asked the same: nothing is written behind an end.
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    assert tokenizer("a")["input_ids"][-1] == end[1]
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path)
    for path in (tiny, tmp_path):
        assert not GuardModel(str(path), refuses=(first.upper(),), **options).judge("", "good")
        assert GuardModel(str(path), refuses=(first + "x", "x"), **options).judge("", "good")


@pytest.mark.parametrize(
    ("verdict", "accepted"),
    [
        *[
            ("Nothing in it is harmful.", True),
            ("Nobody is hurt", True),
            ("No-one is named.", True),
            ("Falsehoods: 0", True),
        ],
        *[("safe", True), ("", False), ("Note: unsafe is not the word", True), ("It is not safe", True)],
        *[("no", False), ("No, it is not.", False), ("**Unsafe**\nS1", False), ("\n\n- FALSE!", False)],
        *[("<think>unsafe?</think>\nsafe", True), ("Is it safe? No.</think>\n\nunsafe", False), ("<think>It", False)],
        *[("'incorrect'", False), ("not  safe at all", False), ("Not, as I said, safe", True)],
    ],
)
def test_a_verdict_is_compared_by_words(verdict: str, accepted: bool) -> None:
    refuses = ("unsafe", "false", "no", "incorrect", "not safe")
    assert GuardModel("any", refuses=refuses).accepts(verdict) is accepted


def test_a_prompt_that_names_the_response_keeps_its_words(tiny: Path) -> None:
    guard, tokenizer = GuardModel("any", template="{prompt}|{response}"), AutoTokenizer.from_pretrained(tiny)
    asked = guard._question(tokenizer, "say {response}", "{prompt}", closed=False)
    assert tokenizer.decode(asked) == "say {response}|{prompt}"


@pytest.mark.parametrize("broken", ["", "file", "no model"])
def test_a_guard_model_that_is_none_is_named_by_its_argument(
    broken: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty name is not the working directory, though that holds a model."""
    (tmp_path / "file").touch()
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "no model")
    monkeypatch.chdir(tiny)
    name = str(tmp_path / broken) if broken else broken
    with pytest.raises(ModelError, match=re.escape(f"guard model, model_name={name!r}: ")):
        GuardModel(name).judge("a", "b")


def test_words_of_a_refusal_are_words() -> None:
    for wrong in ((), ("",), ("no", "?")):
        with pytest.raises(ConfigError, match=r"refuses of a guard model|GuardModel\.refuses"):
            make_constraint("guard_model", model_name="any", refuses=wrong)


def test_a_guard_model_holds_responses_of_a_run_back(tiny: Path, tmp_path: Path) -> None:
    path = save_classifier(tiny, tmp_path / "classifier")
    episode = make_constraint("fact_checker", model_name=str(path), minimum=1e9, max_resamples=1)
    task = Task("held", "grpo", {"reward": low_bytes}, n=2, episode=episode)
    trainer = verl.Trainer(actor(tiny), tasks=[task], log_dir=False)
    assert trainer.step(PROMPTS)["rollout/rejection_rate"] == 1.0


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("fact_checkr", {}, "no guard is called 'fact_checkr': did you mean 'fact_checker'"),
        ("fact_checker", {}, "guard 'fact_checker': .*model_name"),
        ("fact_checker", {"model_name": "x", "template": "no place"}, r"must contain \{response\}"),
        ("fact_checker", {"model_name": "x", "max_new_tokens": 0}, "at least 1, not 0"),
        ("regex", {"pattern": "a"}, "takes grammar"),
        ("absent.py:f", {}, "absent.py does not exist"),
        ("FILE:accept", {"every": 3}, "takes no options"),
        ("FILE:Checker", {"size": 3}, "Checker"),
    ],
)
def test_a_wrong_constraint_is_refused_by_name(tmp_path: Path, model: str, config: dict[str, Any], words: str) -> None:
    file = tmp_path / "checks.py"
    file.write_text("def accept(text, row):\n    return True\n\n\nclass Checker:\n    every = 4\n")
    with pytest.raises(ConfigError, match=words):
        make_constraint(model.replace("FILE", str(file)), **config)
