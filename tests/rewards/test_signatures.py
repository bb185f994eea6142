"""The forms, each written as its library's documents write it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.batch import Batch
from verl.data.prompts import load_prompts
from verl.errors import ConfigError, RewardError
from verl.rewards.make import make_reward
from verl.rewards.signatures import recognise
from verl.rewards.source import run_reward
from verl.roles.reward import Reward

TEXTS = Batch.from_rows([{"prompt": "p0", "response": "a"}, {"prompt": "p1", "response": "bbb"}])


def score(source: Any, batch: Batch = TEXTS, **options: Any) -> list[float | None]:
    result = run_reward(make_reward(source, **options), batch)
    assert len(result.reward) == len(result.reasons) == len(batch)
    return result.reward


async def later(texts: list[str]) -> list[int]:
    await asyncio.sleep(0.01)
    return [len(text) for text in texts]


async def later_one(texts: list[str]) -> float:
    return 1.0


class Callable:
    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


def scaled(texts: list[str], factor: float) -> list[float]:
    return [factor * len(text) for text in texts]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda texts: texts, "texts"),
        (lambda anything: anything, "texts"),
        (later, "texts"),
        (Callable(), "texts"),
        (partial(scaled, factor=2.0), "texts"),
        (len, "texts"),
        (lambda responses, prompts: 0, "pairs"),
        (lambda prompts, responses: 0, "pairs"),
        (lambda outputs, prompts, **kwargs: 0, "pairs"),
        (lambda completions, **kwargs: 0, "trl"),
        (lambda prompts, completions, answer: 0, "trl"),
        (lambda environments, **kwargs: 0, "trl"),
        (lambda completion_ids, **kwargs: 0, "trl"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "verl"),
        (lambda solution_str, ground_truth: 0, "verl"),
        (lambda queries, prompts, labels: 0, "openrlhf"),
        (lambda data_source, solution_str, ground_truth, extra_info, **kwargs: 0, "verl"),
    ],
)
def test_forms_are_recognised(function: Any, kind: str) -> None:
    assert recognise(function).kind == kind


@pytest.mark.parametrize("function", [lambda: 0, lambda **kwargs: 0, lambda *args: 0, lambda prompts: 0])
def test_unknown_forms_are_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match="none of the known signatures"):
        recognise(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda texts: [1, 3],
        lambda texts: (1.0, 3.0),
        lambda texts: np.array([1, 3], np.float32),
        lambda texts: torch.tensor([1.0, 3.0], requires_grad=True),
        lambda texts: torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16),
        lambda texts: [torch.tensor(1.0), np.float16(3)],
        lambda texts: [{"score": 1}, {"reward": 3.0}],
        lambda texts: {"score": [1, 3]},
        lambda texts: (len(text) for text in texts),
        lambda texts: later(texts),
        lambda texts: asyncio.run(later(texts)),
        lambda responses, prompts: [
            len(r) * (p == f"p{i}") for i, (r, p) in enumerate(zip(responses, prompts, strict=True))
        ],
        lambda prompts, responses: [len(response) for response in responses],
        later,
        Callable(),
        partial(scaled, factor=1.0),
    ],
)
def test_results_in_every_shape(function: Any) -> None:
    assert score(function) == [1.0, 3.0]


def test_bools_and_one_sample() -> None:
    assert score(lambda texts: [True, False]) == [1.0, 0.0]
    assert score(lambda texts: [0.5], TEXTS.slice(0, 1)) == [0.5]
    assert score(lambda texts: [], TEXTS.slice(0, 0)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda text: len(text),
        lambda texts: True,
        lambda texts: np.float64(1.0),
        lambda texts: torch.tensor(1.0),
        lambda texts: None,
        lambda texts: {"score": 1.0},
        lambda texts: {"rewards": 1.0},
        lambda responses, prompts: 1.0,
        lambda completions, **columns: 1.0,
        lambda queries, prompts, labels: 1.0,
        partial(lambda texts, by: by, by=1.0),
        later_one,
    ],
)
def test_a_bare_number_is_no_list_of_one(function: Any) -> None:
    """`len(text)` is 1 for a list of one text, whatever the text."""
    result = run_reward(make_reward(function), TEXTS.slice(1, 2))
    assert result.reward == [None] and "a list of 1 result" in str(result.reasons[0])


@pytest.mark.parametrize(
    "value", [1, True, np.float64(1.0), torch.tensor(1.0), [1.0], {"score": 1.0}, {"rewards": 1.0}]
)
def test_a_function_of_one_sample_returns_one(value: Any) -> None:
    assert score(lambda solution_str: value, TEXTS.slice(0, 1)) == [1.0]
    assert score(lambda solution_str: value) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "meant"),
    [
        (lambda prompt, response: 0, r"\(prompts, responses\)"),
        (lambda response, prompt: 0, r"\(responses, prompts\)"),
        (lambda prompt, completion, answer: 0, r"\(prompts, completions, answer\)"),
        (lambda query, response: 0, r"\(queries, responses\)"),
        (lambda prompt: 0, r"\(prompts\)"),
        (lambda prompt, text, **rest: 0, r"\(prompts, texts, rest\)|\(prompts, texts\)"),
    ],
)
def test_names_of_one_sample_are_refused_with_those_of_several(function: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"names one sample.*did you mean <lambda>{meant}"):
        make_reward(function)


def test_a_lacking_column_may_be_a_form_s_own() -> None:
    with pytest.raises(RewardError, match=r"needs a column 'prompt'.*did you mean 'prompts'"):
        score(lambda completions, prompt: [0, 0])


VERL = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] in (0, 1)
    found = re.findall(r"#### (\\-?[0-9\\.\\,]+)", solution_str)
    correct = bool(found) and found[-1] == ground_truth
    return {"score": 1.0 if correct else 0.0, "acc": correct, "pred": found[-1] if found else ""}
"""
TRL = '''
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    completion_contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in completion_contents]

def correctness(prompts, completions, answer, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert kwargs["id"] == ["x", "y"] and len(kwargs["completion_ids"]) == 2
    return [2.0 if a in c[0]["content"] else None for a, c in zip(answer, completions)]

def plain_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
'''


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "verl_reward.py").write_text(VERL)
    (tmp_path / "trl_reward.py").write_text(TRL)
    verl_rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(2)
    ]
    (tmp_path / "verl.jsonl").write_text("\n".join(map(json.dumps, verl_rows)))
    trl_rows = [
        {"id": n, "prompt": [{"role": "user", "content": "?"}], "answer": a} for n, a in (("x", "4"), ("y", "5"))
    ]
    (tmp_path / "trl.jsonl").write_text("\n".join(map(json.dumps, trl_rows)))
    return tmp_path


def samples(path: Path, responses: list[str]) -> Batch:
    data = load_prompts(path)
    # A rollout adds columns of its own, one of which has the name of a user's column.
    names = [f"e0.{i}/0" for i in range(len(responses))]
    tokens = [list(range(len(r))) for r in responses]
    return data.batch.add({"response": responses, "response_tokens": tokens, "id": names})


def test_verls_file_and_data_unchanged(files: Path) -> None:
    batch = samples(files / "verl.jsonl", ["so #### 0", "so #### 7"])
    for workers in (0, 1):
        source = Reward(str(files / "verl_reward.py"), workers=workers).source
        result = run_reward(source, batch)
        assert result.reward == [1.0, 0.0]
        assert result.components == {"acc": [1.0, 0.0]}


def test_trls_file_and_data_unchanged(files: Path) -> None:
    batch = samples(files / "trl.jsonl", ["<think>a</think>4", "6"])
    path = files / "trl_reward.py"
    assert score(f"{path}:format_reward_func", batch) == [1.0, 0.0]
    assert score(f"{path}:correctness", batch) == [2.0, None]
    assert score([f"{path}:correctness", f"{path}:format_reward_func"], batch, partial=True) == [3.0, 0.0]
    plain = Batch.from_rows([{"prompt": "p", "response": "four"}])
    assert score(f"{path}:plain_length", plain) == [4.0]


OPENRLHF = """
import torch

def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    reward = torch.tensor([float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)])
    return {"rewards": reward, "scores": reward.clamp(0, 1), "extra_logs": {"length": reward + 1}}

def plain(queries, prompts, labels):
    return torch.tensor([float(len(query)) for query in queries])
"""


def test_openrlhfs_file_and_data_unchanged(tmp_path: Path) -> None:
    """Prompts under `input_key`, labels under their own name; the data and the function as they are."""
    (tmp_path / "reward_func.py").write_text(OPENRLHF)
    rows = [{"input": "1 + 1 = ", "label": "2"}, {"input": "2 + 2 = ", "label": "4"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_prompts(tmp_path / "data.jsonl", prompt_column="input")
    batch = data.batch.add({"response": ["2", "5"]})
    path = f"{tmp_path / 'reward_func.py'}"
    result = run_reward(make_reward(f"{path}:reward_func"), batch)
    assert result.reward == [1.0, 0.0]
    assert result.components == {"scores": [1.0, 0.0], "length": [2.0, 1.0]}
    assert score(f"{path}:plain", batch) == [9.0, 9.0]
    one = run_reward(make_reward(f"{path}:reward_func"), batch.take([1]))
    assert one.reward == [0.0] and one.components["length"] == [1.0]
    print("\nOpenRLHF 3 of 3")  # its JSONL, its reward function, what that returns


def test_parameters_are_filled_from_columns() -> None:
    batch = TEXTS.add({"bonus": [10, 20], "reward_model": [{"ground_truth": "a"}, {"ground_truth": "c"}]})
    assert score(lambda texts, bonus: [len(t) + b for t, b in zip(texts, bonus, strict=True)], batch) == [11.0, 23.0]
    assert score(lambda solution_str, ground_truth, bonus=0: float(solution_str == ground_truth) + bonus, batch) == [
        11.0,
        20.0,
    ]
    assert score(
        lambda completions, ground_truth: [float(c == g) for c, g in zip(completions, ground_truth, strict=True)], batch
    ) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"needs a column 'bonos', which the data do not have: did you mean 'bonus'"):
        score(lambda texts, bonos: [0, 0], batch)
    with pytest.raises(RewardError, match="no column 'response'"):
        score(lambda texts: [0, 0], TEXTS.drop(["response"]))


def test_files_are_refused_in_plain_words(files: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        make_reward(str(files / "none.py"))
    with pytest.raises(ConfigError, match="did you mean 'plain_length'"):
        make_reward(f"{files / 'trl_reward.py'}:plain_lenght")
    (files / "broken.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match=r"broken\.py cannot be imported: SystemExit: 3"):
        make_reward(str(files / "broken.py"))


def test_a_file_is_imported_once(files: Path) -> None:
    (files / "count.py").write_text(
        f"from pathlib import Path\np = Path({str(files / 'n')!r})\n"
        "p.write_text(p.read_text() + '.' if p.exists() else '.')\n"
        "def f(texts): return [0] * len(texts)\ndef g(texts): return [0] * len(texts)\n"
    )
    make_reward({"one": f"{files / 'count.py'}:f", "two": f"{files / 'count.py'}:g"})
    assert (files / "n").read_text() == "."


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (lambda texts: 0, {"timeot": 3}, "did you mean 'timeout'"),
        (lambda texts: 0, {"timeout": 0}, "FunctionReward.timeout: must be more than 0"),
        (lambda texts: 0, {"workers": 1}, "not to one of its parts"),
        (3.5, {}, "cannot be made from a float"),
        ({}, {}, "at least one reward"),
        ("tasks", {}, "did you mean 'task'"),
    ],
)
def test_wrong_rewards_are_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(source, **options)
