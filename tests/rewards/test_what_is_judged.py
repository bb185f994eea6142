"""What is judged is what the policy wrote: results of tools and observations of environments are never its words."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import verl
from tests.conftest import Plain
from tests.rollout.test_tools import Scripted, call, play
from verl.data.text import ResponseText
from verl.report.metrics import Metric
from verl.rewards.make import make_reward
from verl.rollout.tools import ToolEpisode
from verl.rollout.turns import Outcome, Turns, episode_rows

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
RESULT = "#### 4, so it is \\boxed{4} <answer>4</answer> Score: 9\n```python\ndef f():\n    return 4\n```"


def lookup(item: str) -> str:
    """Looks it up.

    Args:
        item: what
    """
    return RESULT


CALL = call("lookup", item="it")


@pytest.fixture(scope="module")
def chat(tiny: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny)  # type: ignore[no-any-return]


def samples(tokenizer: PreTrainedTokenizerBase, *episodes: list[str], **columns: Any) -> verl.Batch:
    """A row for each list of the policy's turns, between which the tool answers, as an actor would return them."""
    row = {"prompt": "What is it?", "prompt_tokens": tokenizer("What is it?")["input_ids"]}
    ids = [str(number) for number in range(len(episodes))]
    outcomes = [
        play(ToolEpisode([lookup]), tokenizer, turns, row={**row, "id": name})[0]
        for name, turns in zip(ids, episodes, strict=True)
    ]
    prompts = verl.Batch.from_rows([{**row, "id": name, "group": name, **columns} for name in ids])
    batch = episode_rows(prompts, outcomes, 0)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")]
    return batch.add(ResponseText(tokenizer, ends).columns(batch))


def test_a_response_is_what_the_policy_wrote_turn_by_turn(chat: PreTrainedTokenizerBase) -> None:
    batch = samples(chat, ["It is 5.<|end|>"], [CALL, "It is 5.<|end|>"], [CALL, "<|end|>"], [CALL, CALL, "So 5."])
    asked = CALL.removesuffix("<|end|>")
    assert batch["response"] == ["It is 5.", f"{asked}\nIt is 5.", asked, f"{asked}\n{asked}\nSo 5."]
    assert batch["last_turn"] == [None, "It is 5.", "", "So 5."]
    assert "last_turn" not in samples(chat, ["It is 5.<|end|>"])


def test_tokens_that_a_grammar_forced_are_the_policys_words(chat: PreTrainedTokenizerBase) -> None:
    said, read = (chat(text, add_special_tokens=False)["input_ids"] for text in ('{"x": 4}', "and then?"))
    forced = Turns([*said, *read], [0] * len(said) + [0] * len(read), [0.0] * len(said + read))
    forced.token_versions = [2] * len(said) + [-1] * len(read)
    plain = Turns(list(read), [0] * len(read), [0.0] * len(read))  # of an episode that does not say versions
    prompts = verl.Batch.from_rows([{"id": name, "prompt_tokens": [1]} for name in "ab"])
    batch = episode_rows(prompts, [Outcome(0, [forced]), Outcome(1, [plain])], 2)
    assert ResponseText(chat, [chat.eos_token_id]).columns(batch) == {"response": ['{"x": 4}', ""]}


@pytest.mark.reward_processes
@pytest.mark.parametrize("name", ["data_source", "code", "codebleu", "task"])
def test_a_verifier_judges_the_last_turn_of_the_policy(chat: PreTrainedTokenizerBase, name: str) -> None:
    right = {"code": "```python\ndef f():\n    return 4\n```", "task": "4"}
    right |= {"codebleu": right["code"], "data_source": "#### 4"}
    says = right[name]
    wrong = "```python\nx = 5\n```" if "code" in name else "It is \\boxed{5}."
    problem = {"task": "chain_sum", "options": {}, "entry": {"question": "2 + 2", "answer": "4", "metadata": {}}}
    columns = {
        "data_source": {"data_source": "openai/gsm8k", "ground_truth": "4"},
        "code": {"tests": "assert f() == 4"},
        "codebleu": {"reference": "def f():\n    return 4\n"},
        "task": {"reasoning_gym": json.dumps(problem)},
    }[name]
    batch = samples(chat, [CALL, f"{says}<|end|>"], [CALL, f"{wrong}<|end|>"], [CALL, "Done.<|end|>"], **columns)
    options: dict[str, Any] = {"evaluator": "codebleu"} if name == "codebleu" else {}
    reward = verl.Reward("code_evaluator" if name == "codebleu" else name, max_failure_rate=1.0, **options)
    try:
        first, *others = reward.get_reward(batch)["reward"]
    finally:
        reward.close()
    assert first == 1.0 and all(other is not None and other < 0.5 for other in others), (first, others)


@pytest.mark.parametrize("form", ["texts", "pairs", "verl", "openrlhf", "metric"])
def test_a_function_gets_a_text_without_results(chat: PreTrainedTokenizerBase, form: str) -> None:
    seen: list[str] = []
    functions: dict[str, Callable[..., Any]] = {
        "texts": lambda texts: [seen.append(text) or 0.0 for text in texts],
        "pairs": lambda responses, prompts: [seen.append(text) or 0.0 for text in responses],
        "verl": lambda data_source, solution_str, ground_truth: seen.append(solution_str) or 0.0,
        "openrlhf": lambda queries, prompts, labels: [seen.append(text) or 0.0 for text in queries],
        "metric": lambda texts: [seen.append(text) or 0.0 for text in texts],
    }
    batch = samples(chat, [CALL, "Done.<|end|>"], ground_truth="4", data_source="x")
    if form == "metric":
        Metric("said", functions[form])(batch)
    else:
        verl.Reward(functions[form], process=False).get_reward(batch)
    (text,) = seen
    assert text.endswith("Done.") and RESULT not in text and "boxed" not in text


def test_functions_of_conversations_get_results_as_those_of_tools(chat: PreTrainedTokenizerBase) -> None:
    seen: list[Any] = []
    batch = samples(chat, [CALL, "Done.<|end|>"], ["At once.<|end|>"])

    def score(texts: list[str], messages: list[Any]) -> list[float]:
        seen.extend(messages)
        return [0.0] * len(texts)

    def trl(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    for function in (score, trl):
        verl.Reward(function, process=False).get_reward(batch)
    asked, user = CALL.removesuffix("<|end|>"), {"role": "user", "content": "What is it?"}
    behind = [{"role": "assistant", "content": asked}, {"role": "tool", "content": RESULT},
              {"role": "assistant", "content": "Done."}]  # fmt: skip
    assert seen == [[user, *behind], [user, {"role": "assistant", "content": "At once."}], behind,
                    [{"role": "assistant", "content": "At once."}]]  # fmt: skip


def test_a_judge_and_a_service_read_what_the_policy_wrote(
    chat: PreTrainedTokenizerBase, serve: Callable[..., Plain]
) -> None:
    batch, url = samples(chat, [CALL, "Done.<|end|>"]), serve(1).url
    said = batch["response"][0]
    assert verl.Reward(url=f"{url}/score").get_reward(batch)["reward"] == [float(len(said))]
    judge = verl.Reward(url=url, template="{response}", scale=(0, 1000))
    assert judge.get_reward(batch)["reward"] == [float(len(said))]


def test_in_workers_the_last_turn_is_judged_too(chat: PreTrainedTokenizerBase) -> None:
    code = make_reward("code", workers=lambda function, name: _Here(function))
    assert code.signature.judges == "last_turn" and "last_turn?" in code.columns  # type: ignore[attr-defined]


class _Here:
    """Stands for worker processes; it is called by none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def close(self) -> None: ...


@needs_math_verify
@pytest.mark.reward_processes
def test_an_answer_that_stands_in_a_result_alone_is_no_answer(tiny: Path) -> None:
    class Engine(Scripted):
        def __init__(self, packed: Any, tokenizer: PreTrainedTokenizerBase, ends: Any, options: Any) -> None:
            super().__init__(tokenizer, [turn for last in lasts for turn in (CALL, last)])

    lasts = ["It is \\boxed{5}.<|end|>", "Done.<|end|>", "<|end|>", "It is \\boxed{4}.<|end|>"]
    actor = verl.Actor(
        str(tiny), rollout=Engine, episode=ToolEpisode([lookup], max_turns=2), sampling={"max_new_tokens": 400}
    )
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
    batch = verl.Batch.concat([actor.generate_sequences([row], key=str(number)) for number in range(4)])
    reward = verl.Reward("math", max_failure_rate=1.0)
    try:
        assert reward.get_reward(batch)["reward"] == [0.0, 0.0, 0.0, 1.0]
    finally:
        reward.close()
