from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.batch import Batch
from verl.data.offline import OfflineDatasetLoader
from verl.errors import DataError
from verl.models.loading import load_tokenizer

ASK = [{"role": "user", "content": "Sky?"}]
GOOD, BAD = [{"role": "assistant", "content": "Blue."}], [{"role": "assistant", "content": "Red."}]
PAIRS = {
    "strings": {"prompt": "The sky is", "chosen": " blue.", "rejected": " red."},
    "implicit strings": {"chosen": "The sky is blue.", "rejected": "The sky is red."},
    "chats": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "implicit chats": {"chosen": ASK + GOOD, "rejected": ASK + BAD},
    "chats beside a prompt's text": {"prompt": "Sky?", "chosen": ASK + GOOD, "rejected": ASK + BAD},
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_pair_is_a_group_of_two_rows(kind: str, tokenizer: Any) -> None:
    loader = OfflineDatasetLoader([{**PAIRS[kind], "score": 3}] * 2, tokenizer)
    batch = loader.batch
    assert (loader.kind, len(loader), len(batch)) == ("pairs", 2, 4)
    assert batch.group_indices() == [[0, 1], [2, 3]]
    assert batch["label"] == [1.0, 0.0, 1.0, 0.0]
    assert len(set(batch["id"])) == 4
    assert batch["score"] == [3] * 4
    assert batch["prompt_tokens"][0] == batch["prompt_tokens"][1]
    whole = [tokenizer.decode(p + r) for p, r in zip(batch["prompt_tokens"], batch["response_tokens"], strict=True)]
    if "strings" in kind:
        assert whole[:2] == ["The sky is blue.<|end|>", "The sky is red.<|end|>"]
    else:
        start = "<|user|>Sky?<|end|>\n<|assistant|>"
        assert whole[:2] == [f"{start}Blue.<|end|>", f"{start}Red.<|end|>"]
    assert batch.lengths("response_mask") == batch.lengths("response_tokens")
    assert {bit for row in batch["response_mask"] for bit in row} == {1}


@pytest.mark.parametrize("name", ["question", "problem"])
@pytest.mark.parametrize(
    "replies",
    [{"chosen": "It is blue.", "rejected": "It is red."}, {"response": "Blue.", "label": 1}, {"completion": "x"}],
)
def test_a_question_stands_in_the_place_of_a_prompt(name: str, replies: dict[str, Any], tokenizer: Any) -> None:
    found = OfflineDatasetLoader([{name: "Sky?", "system": "be nice", **replies}], tokenizer)
    asked = OfflineDatasetLoader([{"prompt": "Sky?", "system": "be nice", **replies}], tokenizer)
    assert found.kind == asked.kind and found.batch == asked.batch
    messages = OfflineDatasetLoader([{name: "other", "messages": ASK + GOOD}], tokenizer)
    assert (messages.kind, messages.batch["response"]) == ("demonstrations", ["Blue."])


def test_replies_may_be_text_of_json(tokenizer: Any) -> None:
    plain, text = ({name: write(chat) for name, chat in (("prompt", ASK), ("chosen", GOOD), ("rejected", BAD))}
                   for write in (list, json.dumps))  # fmt: skip
    assert OfflineDatasetLoader([plain], tokenizer).batch == OfflineDatasetLoader([text], tokenizer).batch
    (reply,) = OfflineDatasetLoader([{"prompt": ASK, "completion": json.dumps(GOOD)}], tokenizer).batch["response"]
    assert reply == GOOD[0]["content"]


def test_a_prompt_that_begins_before_what_both_replies_repeat_is_whole(tokenizer: Any) -> None:
    prompt = [{"role": "system", "content": "be nice"}, *ASK]
    pairs = [{"prompt": prompt, "chosen": ASK + GOOD, "rejected": ASK + BAD}]
    apart = [{"prompt": prompt, "chosen": GOOD, "rejected": BAD}]
    assert OfflineDatasetLoader(pairs, tokenizer).batch == OfflineDatasetLoader(apart, tokenizer).batch


@pytest.mark.parametrize("name", ["completion", "response"])
def test_labels_and_demonstrations(name: str, tokenizer: Any) -> None:
    rows = [{"prompt": "1+1=", name: "2", "label": True}, {"prompt": "1+1=", name: "3", "label": False}]
    loader = OfflineDatasetLoader(rows, tokenizer)
    assert (loader.kind, loader.batch["label"], len(loader)) == ("labels", [1.0, 0.0], 2)
    loader = OfflineDatasetLoader([{"prompt": "1+1=", name: "2"}], tokenizer)
    assert loader.kind == "demonstrations"
    assert tokenizer.decode(loader.batch["response_tokens"][0]) == "2<|end|>"
    loader = OfflineDatasetLoader([{"messages": ASK + GOOD}], tokenizer)
    assert tokenizer.decode(loader.batch["response_tokens"][0]) == "Blue.<|end|>"
    both = [{"prompt": "as the chat begins", "messages": ASK + GOOD}]
    assert OfflineDatasetLoader(both, tokenizer).batch == loader.batch


@pytest.mark.parametrize("kind", ["demonstrations", "labels", "pairs"])
def test_a_reply_is_trained_with_all_that_its_template_writes(kind: str, tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments.x }})]{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    replies = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "Blue.", "reasoning_content": "Seen."},
        {"role": "assistant", "content": "Blue.", "tool_calls": None},
    ]
    rows = {
        "demonstrations": [{"messages": [*ASK, reply]} for reply in replies],
        "labels": [{"prompt": ASK, "completion": [reply], "label": 1} for reply in replies],
        "pairs": [{"chosen": [*ASK, reply], "rejected": ASK + BAD} for reply in replies],
    }[kind]
    batch = OfflineDatasetLoader(rows, tokenizer).batch
    written = [tokenizer.decode(tokens) for tokens in batch["response_tokens"]]
    expected = ["[f(1)]<|end|>", "<think>Seen.</think>Blue.<|end|>", "Blue.<|end|>"]
    assert written[:: 2 if kind == "pairs" else 1] == expected
    assert batch["response"][:: 2 if kind == "pairs" else 1] == ["", "Blue.", "Blue."]
    with pytest.raises(DataError, match="row 0: the response has tool_calls besides its content"):
        OfflineDatasetLoader([{"prompt": "Sky?", "completion": replies[:1]}], tokenizer)


def test_a_template_that_cannot_write_a_whole_reply_is_told(tokenizer: Any) -> None:
    row = {"messages": [*ASK, {**GOOD[0], "reasoning_content": "Seen."}]}
    with pytest.raises(DataError, match="does not write reasoning_content"):
        OfflineDatasetLoader([row], tokenizer)
    row = {"messages": [*ASK, {**GOOD[0], "tool_calls": [{"type": "function"}]}]}
    with pytest.raises(DataError, match="does not write tool_calls"):
        OfflineDatasetLoader([row], tokenizer)


def test_recorded_experience_keeps_everything(tmp_path: Path) -> None:
    batch = Batch.from_rows(
        [
            {"id": f"e0.1/{i}", "group": "e0.1", "prompt_tokens": [1, 2], "response_tokens": [3] * i}
            | {"rollout_log_probs": [-0.5] * i, "reward": None if i == 2 else 1.0}
            for i in range(1, 4)
        ]
    )
    batch.to_parquet(tmp_path / "step-1.parquet")
    batch.to_parquet(tmp_path / "step-2.parquet")
    loader = OfflineDatasetLoader(tmp_path / "step-1.parquet")
    assert loader.kind == "experience"
    assert loader.batch == batch
    assert len(OfflineDatasetLoader(tmp_path).batch) == 6


def record(rows: list[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".parquet":
        Batch.from_rows(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_recorded_rows_without_a_group_are_groups_of_their_own(tmp_path: Path, suffix: str) -> None:
    tokens = {"prompt_tokens": [5], "response_tokens": [6]}
    grouped, alone = [{"id": f"2/{i}", "group": "2", **tokens} for i in range(2)], [tokens] * 3
    for name, rows in (("a", grouped), ("b", alone)):
        record(rows, tmp_path / f"{name}.{suffix}")
    loader = OfflineDatasetLoader(tmp_path, batch_size=4, shuffle=False)
    batch = next(loader)
    assert len(loader) == 4 and batch.group_indices() == [[0, 1], [2], [3], [4]]
    assert len(set(batch["id"])) == 5
    (tmp_path / f"a.{suffix}").unlink()
    assert OfflineDatasetLoader(tmp_path).batch["group"] == ["0", "1", "2"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_groups_of_two_recordings_stay_apart(tmp_path: Path, suffix: str) -> None:
    recordings = [("c0.0", [5]), ("c0.0", [7]), ("own", [8]), ("0.c0.0", [9])]
    for number, (group, prompt) in enumerate(recordings):
        rows = [{"id": f"{group}/{i}", "group": group, "prompt_tokens": prompt, "response_tokens": [6]} for i in (0, 1)]
        record(rows, tmp_path / f"{number}.{suffix}")
    loader = OfflineDatasetLoader(tmp_path, batch_size=4, shuffle=False)
    batch = next(loader)
    assert len(loader) == 4 and batch.group_indices() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(set(batch["id"])) == 8 and batch["group"][4] == "e0.own"


def test_recorded_rows_are_of_no_version_of_the_policy_that_learns(tmp_path: Path) -> None:
    rows = [{"prompt_tokens": [5], "response_tokens": [6], "policy_version": 0}]
    Batch.from_rows(rows).to_parquet(tmp_path / "rows.parquet")
    for source in (rows, tmp_path / "rows.parquet"):
        assert "policy_version" not in OfflineDatasetLoader(source).batch


def test_what_the_recording_models_computed_is_not_the_learners(tmp_path: Path) -> None:
    computed = ("log_probs", "ref_log_probs", "values", "cost_values", "advantages", "returns")
    numbers = {name: [-9.0] for name in computed}
    kept = {"rollout_log_probs": [-0.5], "response_mask": [1], "reward": 1.0, "token_rewards": [1.0]}
    rows = [
        {"id": "0", "group": "0", "prompt_tokens": [5], "response_tokens": [6], **kept, **numbers, "loss_mask": [0]}
    ]
    Batch.from_rows(rows).to_parquet(tmp_path / "rows.parquet")
    for source in (rows, tmp_path / "rows.parquet"):
        columns = set(OfflineDatasetLoader(source).batch.columns)
        assert columns == {"id", "group", "prompt_tokens", "response_tokens", *kept}


def test_lengths_are_bounded(tokenizer: Any) -> None:
    rows = [{"prompt": "ab", "completion": "12345"}, {"prompt": "abcdef", "completion": "1"}]
    loader = OfflineDatasetLoader(rows, tokenizer, max_prompt_length=4, max_response_length=3, truncation="drop")
    assert [tokenizer.decode(tokens) for tokens in loader.batch["response_tokens"]] == ["123"]
    assert loader.counts["dropped"] == loader.counts["responses_truncated"] == 1


def test_batches_are_whole_groups_and_resume_exactly() -> None:
    rows = [{"prompt": f"p{i} ", "chosen": "a", "rejected": "b"} for i in range(5)]

    def make() -> OfflineDatasetLoader:
        return OfflineDatasetLoader(rows, batch_size=3, seed=2)

    straight = make()
    expected = [next(straight) for _ in range(7)]
    for batch in expected:
        assert [len(group) for group in batch.group_indices()] == [2, 2, 2]
    second = make()
    second.load_state_dict(json.loads(json.dumps(make().state_dict())))
    assert next(second) == expected[0]
    state = json.loads(json.dumps(second.state_dict()))
    third = make()
    third.load_state_dict(state)
    assert [next(third) for _ in range(6)] == expected[1:]
    with pytest.raises(DataError, match="groups was 5, is 4"):
        OfflineDatasetLoader(rows[:4], batch_size=3, seed=2).load_state_dict(state)
    other = OfflineDatasetLoader([*rows[:4], rows[4] | {"rejected": "c"}], batch_size=3, seed=2)
    with pytest.raises(DataError, match=r"digest was .* the same data and seed, or start anew"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty"),
        ([{"story": "x"}], r"columns \['story'\] are none of: pairs"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "row 1 is no row of demonstrations"),
        (
            [{"prompt": "a", "completion": "b", "label": 1}, {"prompt": "a", "completion": "b", "label": None}],
            r"values in \['completion', 'prompt'\]",
        ),
        (
            [{"instruction": "Sky?", "chosen": "It is blue.", "rejected": "It is red."}],
            "no prompt, and instruction beside",
        ),
        ([{"prompt": "a", "completion": "b", "label": "good"}], "row 0: label is true or false"),
        ([{"chosen": "x", "rejected": "y"}], "row 0: column 'prompt' is an empty prompt"),
        ([{"prompt": "a", "chosen": "x", "rejected": GOOD}], "row 0: chosen and rejected must both"),
        ([{"chosen": GOOD, "rejected": BAD}], "row 0 has no prompt"),
        ([{"prompt": "Why a?", "chosen": "Why a? It", "rejected": "Why a? No"}], "begin with the prompt"),
        ([{"prompt": ASK, "completion": [{"role": "assistant", "content": None}]}], "row 0.* content is null"),
        ([{"prompt": ASK, "completion": GOOD + ASK}], "row 0: the response must be one message"),
    ],
)
def test_bad_rows_are_named(rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        OfflineDatasetLoader(rows)


def test_columns_of_openrlhf_and_of_any_names(tokenizer: Any) -> None:
    plain = OfflineDatasetLoader([{"prompt": "The sky is", "completion": " blue."}] * 2, tokenizer).batch
    theirs = OfflineDatasetLoader([{"input": "The sky is", "output": " blue."}] * 2, tokenizer)
    assert theirs.kind == "demonstrations" and theirs.batch["response_tokens"] == plain["response_tokens"]
    pair = {"q": "The sky is", "better": " blue.", "worse": " red.", "chosen": 3}
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    named = OfflineDatasetLoader([pair] * 2, tokenizer, columns=columns)
    usual = OfflineDatasetLoader([PAIRS["strings"]] * 2, tokenizer)
    assert named.kind == "pairs" and named.batch["response_tokens"] == usual.batch["response_tokens"]
    with pytest.raises(DataError, match=r"row 1: there is no column 'worse' \(data.columns\): it has"):
        OfflineDatasetLoader([pair, {"q": "a", "better": "b"}], tokenizer, columns=columns)


def test_a_column_may_be_part_of_another_and_a_text_a_chat() -> None:
    row = {"extra_info": {"question": "one", "answer": "two"}, "prompt": [{"role": "user", "content": "other"}]}
    columns = {"prompt": "extra_info.question", "completion": "extra_info.answer"}
    (messages,) = OfflineDatasetLoader([row], columns=columns, chat=True).batch["messages"]
    assert json.loads(messages) == [{"role": "user", "content": "one"}]
    assert OfflineDatasetLoader([row], columns=columns).batch["prompt"] == ["one"]
    with pytest.raises(DataError, match=r"there is no column 'extra_info.reply'"):
        OfflineDatasetLoader([row], columns={**columns, "completion": "extra_info.reply"})


@pytest.mark.parametrize("chat", [False, True])
def test_a_pair_of_equal_responses_is_refused_by_its_row(chat: bool) -> None:
    good, bad = (GOOD, BAD) if chat else ("good", "bad")
    rows = [
        {"prompt": ASK if chat else f"p{i}", "chosen": good, "rejected": good if i in (2, 3) else bad} for i in range(5)
    ]
    with pytest.raises(DataError, match=r"row 2: chosen and rejected are the same \(so in 2 of 5 pairs\)"):
        OfflineDatasetLoader(rows)


def test_pairs_that_are_equal_up_to_where_they_are_cut_are_refused(tiny: Path) -> None:
    tokenizer = load_tokenizer(str(tiny))
    rows = [
        {"prompt": "p ", "chosen": "abcd", "rejected": "zbcd"},
        {"prompt": "p ", "chosen": "abcd", "rejected": "abce"},
    ]
    assert len(OfflineDatasetLoader(rows, tokenizer)) == 2
    with pytest.raises(DataError, match="row 1: chosen and rejected are the same, up to the length"):
        OfflineDatasetLoader(rows, tokenizer, max_response_length=3)
