from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.frame import Frame
from verl.data.offline import OfflineDatasetLoader
from verl.data.prompts import check_disjoint, load_prompts, stream_prompts
from verl.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "Name a colour."}]
# As verl's preprocessing scripts write it, and as TRL's documents show it.
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0, "answer": "2+3=5 #### 5"},
}
TRL_ROW = {"prompt": "The sky is", "ground_truth": "blue", "id": 7}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(source: Any, **options: Any) -> list[dict[str, Any]]:
    data = load_prompts(source, **options)
    return list(data.batch.rows())


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_columns_travel_untouched_from_every_file_kind(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        write(path, [VERL_ROW, VERL_ROW])
    elif suffix == "json":
        path.write_text(json.dumps([VERL_ROW, VERL_ROW]))
    else:
        pq.write_table(pa.Table.from_pylist([VERL_ROW, VERL_ROW]), path)
    rows = rows_of(path)
    assert len(rows) == 2
    assert json.loads(rows[0].pop("messages")) == VERL_ROW["prompt"]
    assert rows[0] == {key: value for key, value in VERL_ROW.items() if key != "prompt"}


def test_a_string_stays_a_string_and_a_clashing_column_steps_aside() -> None:
    assert rows_of([TRL_ROW]) == [{"prompt": "The sky is", "ground_truth": "blue", "user.id": 7}]
    # A preference pair, or a measured baseline, is the user's own affair too.
    pair = {"prompt": "Why?", "rejected": "No.", "baseline": 0.6}
    assert rows_of([pair]) == [{"prompt": "Why?", "user.rejected": "No.", "user.baseline": 0.6}]


class TorchSet(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"prompt": f"p{index}", "weight": torch.tensor([index, 1])}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        (CHAT, [CHAT]),
        ([[1, 2], torch.tensor([3])], [[1, 2], [3]]),
        (TorchSet(), ["p0", "p1"]),
        ([{"question": "why?", "answer": "so"}], ["why?"]),
        ([{"messages": CHAT}], [CHAT]),
        ([{"prompt_tokens": [4, 5]}], [[4, 5]]),
        ([{"text": "no", "body": "yes"}], None),
    ],
)
def test_shapes_are_recognised(source: Any, expected: list[Any] | None) -> None:
    if expected is None:
        with pytest.raises(DataError, match=r"row 0 has no prompt.*'body', 'text'"):
            load_prompts(source)
        assert rows_of(source, prompt_column="body")[0]["prompt"] == "yes"
        return
    found = [
        row.get("prompt") or row.get("prompt_tokens") or json.loads(row.get("messages") or "null")
        for row in rows_of(source)
    ]
    assert found == expected


@pytest.mark.parametrize("source", [[{"messages": CHAT, "n": 1}] * 2, TorchSet()])
def test_collated_rows_are_the_rows(source: Any) -> None:
    rows = load_prompts(next(iter(torch.utils.data.DataLoader(source, batch_size=2)))).batch
    listed: Any = torch.utils.data.DataLoader(source, batch_size=2, collate_fn=list)
    assert list(rows.rows()) == list(load_prompts(next(iter(listed))).batch.rows())


def test_bare_chats_that_torch_has_collated_are_refused() -> None:
    with pytest.raises(DataError, match="a DataLoader needs collate_fn=list"):
        load_prompts(next(iter(torch.utils.data.DataLoader([CHAT, CHAT], batch_size=2))))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="a collator makes columns of one length"):
        load_prompts({"prompt": ["a", "b"], "n": [1]})


def test_a_padded_batch_is_token_ids() -> None:
    batch = {"input_ids": torch.tensor([[9, 9, 5], [4, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    assert load_prompts(batch).batch["prompt_tokens"] == [[5], [4, 5, 6]]


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    files = [str(tmp_path / "b.jsonl"), tmp_path / "a.jsonl"]
    assert load_prompts(files).batch["prompt"] == load_prompts({"path": files}).batch["prompt"] == ["b", "a"]
    assert load_prompts(["notes.txt", "a.jsonl"]).batch["prompt"] == ["notes.txt", "a.jsonl"], "texts"


def test_template_and_system_prompt() -> None:
    row = {"prompt": "2+3", "hint": "add"}
    assert rows_of([row], template="Q: {prompt} ({hint}) A:")[0]["prompt"] == "Q: 2+3 (add) A:"
    messages = json.loads(rows_of([row], system_prompt="Be short.", template="{prompt}?")[0]["messages"])
    assert messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+3?"}]
    own = [{"role": "system", "content": "mine"}, *CHAT]
    assert json.loads(rows_of([own], system_prompt="other")[0]["messages"]) == own
    with pytest.raises(DataError, match=r"row 0.*'hont'.*did you mean 'hint'"):
        load_prompts([row], template="{prompt} {hont}")
    with pytest.raises(DataError, match=r"names 'b', .*columns: hint, prompt; text in braces is written \{\{b\}\}"):
        load_prompts([row], template="{prompt} frac{b}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{prompt} Put it in \boxed{}.", r"2+3 Put it in \boxed{}."),
        ('{prompt} as {"answer": 1}', '2+3 as {"answer": 1}'),
        ("{prompt} } { {0} {n.x} {n!r} { n }", "2+3 } { {0} {n.x} {n!r} { n }"),
        ("{{prompt}} {{{prompt}}} {{}} {n}", "{prompt} {2+3} {} {hint}"),
    ],
)
def test_braces_around_anything_but_a_column_are_text(template: str, text: str) -> None:
    assert rows_of([{"prompt": "2+3", "n": "{hint}"}], template=template)[0]["prompt"] == text


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(DataError, match=r"x\.jsonl, line 3 is not valid JSON"):
        load_prompts(path)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl, line 2"):
        load_prompts(path)
    path.write_text('{"prompt": "a", "n": ' + "1" * 5000 + "}")
    with pytest.raises(DataError, match=r"x\.jsonl, line 1 is not valid JSON"):
        load_prompts(path)


@pytest.mark.parametrize("rows", [1, 3])
def test_json_lines_are_read_whatever_the_file_is_called(tmp_path: Path, rows: int) -> None:
    lines = [json.dumps({"prompt": f"p{i}"}) for i in range(rows)]
    path = tmp_path / "x.json"
    path.write_text("".join(f"{line}\n" for line in lines))
    if rows == 1:  # a mapping, as far as anyone can say
        with pytest.raises(DataError, match="neither a list of rows, nor JSON Lines"):
            load_prompts(path)
        return
    assert load_prompts(path).batch["prompt"] == [f"p{i}" for i in range(rows)]
    path.write_text(f"{lines[0]}\n\n{{broken\n")
    with pytest.raises(DataError, match=r"x\.json, line 3 is not valid JSON"):
        load_prompts(path)
    path.write_text(json.dumps({"files": []}, indent=1))
    with pytest.raises(DataError, match="empty"):
        load_prompts(path)


def test_a_directory_named_like_a_file_and_times_beyond_python_are_told(tmp_path: Path) -> None:
    moments = pa.array([10**18], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["a"], "when": moments}), tmp_path / "moments.parquet")
    with pytest.raises(DataError, match=r"moments\.parquet"):
        load_prompts(tmp_path / "moments.parquet")
    (tmp_path / "folder" / "x.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match=r"folder cannot be read: .*x\.jsonl"):
        load_prompts(tmp_path / "folder")


def test_other_columns_or_token_ids_are_other_data() -> None:
    def same(*options: dict[str, Any]) -> bool:
        return len({load_prompts(**{"source": ["a"], **option}).fingerprint() for option in options}) == 1

    assert not same({}, {"source": [{"prompt": "a", "answer": 1}]})
    assert same({"chat": True}, {"source": [[{"role": "user", "content": "a"}]]})
    assert not same({}, {"source": ["a "]})
    assert not same({}, {"chat": True})
    assert not same({"chat": True}, {"system_prompt": "Rhyme."})
    assert not same({"system_prompt": "Rhyme!"}, {"system_prompt": "Rhyme."})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty"),
        ([{"prompt": "a"}, {"prompt": ""}], "row 1: column 'prompt' is an empty prompt"),
        ([{"prompt": "a"}, {"prompt": []}], "row 1: column 'prompt' is an empty prompt"),
        ([{"prompt": "a"}, {"prompt": 3}], "row 1: column 'prompt' is neither"),
        ([{"prompt": "a"}, 3.5], "row 1 is a float"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}], "column 'x' mixes types: row 1"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 2**64}], "column 'x' has a whole number of more than 64 bits in row 1"),
        ([{"prompt": "a", "x": [1]}, {"prompt": "b", "x": [2**64]}], "more than 64 bits in row 1"),
        (
            [{"prompt": "a"}, {"prompt": [{"role": "user", "content": None}]}],
            "row 1: .* role 'user' whose content is null",
        ),
        (
            [{"messages": [CHAT[0], {"role": "assistant", "content": "b"}]}],
            "row 0: the messages end with what the assistant",
        ),
        (
            [{"prompt": "[{'role': 'user', 'content': 'a'}]"}],
            "row 0: column 'prompt' is the text of a chat that is no JSON",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(write(tmp_path / "x.jsonl", rows))


def test_a_chat_may_be_text_of_json() -> None:
    text = chat = json.dumps(CHAT)
    said = json.dumps([{"from": "human", "value": "Name a colour."}])
    for row in ({"prompt": text}, {"messages": text}, {"conversations": said}, {"mine": text}):
        column = "mine" if "mine" in row else None
        assert load_prompts([row], prompt_column=column).batch["messages"] == [chat]
    assert load_prompts([{"prompt": "a", "completion": text}])[0] == {"prompt": "a", "completion": text}
    assert load_prompts(["[1, 2]"]).batch["prompt"] == ["[1, 2]"]


def test_a_template_without_a_place_for_the_prompt_is_refused() -> None:
    for template in ("Solve it.", "Solve {{prompt}}.", "\\boxed{}"):
        with pytest.raises(ConfigError, match="template: names no column"):
            load_prompts(["a"], template=template)


def test_a_value_that_is_nested_too_deeply_is_named() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(DataError, match="row 1: a value is nested too deeply"):
        load_prompts(["a", {"prompt": "b", "x": deep}])


def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), tmp_path / "x.parquet"
    )
    with pytest.raises(DataError, match="columns of one name"):
        load_prompts(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["../secret.jsonl", "/etc/passwd", "link.jsonl", "sub/../../secret.jsonl"])
def test_no_file_outside_the_directory_is_read(tmp_path: Path, name: str) -> None:
    write(tmp_path / "secret.jsonl", ["secret"])
    inner = tmp_path / "data"
    inner.mkdir()
    (inner / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    write(inner / "good.jsonl", ["good"])
    index = inner / "index.json"
    index.write_text(json.dumps({"files": ["good.jsonl", name]}))
    with pytest.raises(DataError, match="leaves the data set's directory"):
        load_prompts(index)
    index.write_text(json.dumps({"files": ["good.jsonl"]}))
    assert rows_of(index) == [{"prompt": "good"}]
    with pytest.raises(DataError, match="leaves the data set's directory"):
        load_prompts(inner)  # link.jsonl lies in it


def test_a_directory_is_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ["2"])
    write(tmp_path / "a.jsonl", ["0", "1"])
    assert [row["prompt"] for row in rows_of(tmp_path)] == ["0", "1", "2"]
    with pytest.raises(DataError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl")


def test_limit_and_streams() -> None:
    assert len(rows_of(["a", "b", "c"], limit=2)) == 2
    stream = stream_prompts(text for text in "ab")
    assert [row["prompt"] for _, row, _ in stream.rows(0)] == ["a", "b"]
    with pytest.raises(DataError, match="a generator has no length: read it with stream_prompts"):
        load_prompts(text for text in "ab")


def test_disjoint_sets() -> None:
    train = load_prompts(["a", "b ", CHAT])
    held_out = load_prompts(["b", "c", [{"role": "system", "content": "new"}, *CHAT]])
    kept, dropped = check_disjoint([train], held_out)
    assert (kept.texts(), dropped) == (["c"], 2)
    with pytest.raises(DataError, match=r"3 of 3 held-out prompts .* nothing is left"):
        check_disjoint([train], train)


SUMS = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def test_splits_of_a_task_are_disjoint_whatever_their_seeds() -> None:
    train = load_prompts({**SUMS, "size": 400, "seed": 1, "split": "train"})
    held_out = load_prompts({**SUMS, "size": 300, "seed": 2, "split": "eval"})
    assert (len(train), len(set(held_out.texts()))) == (400, 300)
    assert check_disjoint([train], held_out)[1] == 0
    again = load_prompts({**SUMS, "size": 300, "seed": 2, "split": "eval"})
    assert again.batch == held_out.batch


def test_a_task_without_split_is_the_tasks_own_sequence() -> None:
    import reasoning_gym

    spec = {"min_terms": 2, "max_terms": 3, "seed": 5, "size": 4}
    mine = load_prompts({"task": "chain_sum", **spec}, chat=False)
    theirs = reasoning_gym.create_dataset("chain_sum", **spec)
    assert mine.batch["prompt"] == [theirs[i]["question"] for i in range(4)]
    assert [row["ground_truth"] for row in mine.batch["reward_model"]] == [theirs[i]["answer"] for i in range(4)]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"task": "chain_som"}, ConfigError, "did you mean 'chain_sum'"),
        ({"task": "chain_sum", "min_term": 2}, ConfigError, "no option 'min_term': did you mean 'min_terms'"),
        ({"task": "chain_sum", "min_terms": 9, "max_terms": 2}, ConfigError, "max_terms"),
        ({"task": "chain_sum", "split": "test"}, ConfigError, "split: must be one of train, eval"),
        ({"task": "chain_sum", "max_terms": 2, "max_digits": 1, "size": 300, "split": "eval"}, DataError, "gave only"),
        ({"tusk": "chain_sum"}, DataError, "needs a task or a path"),
    ],
)
def test_wrong_tasks_are_refused_in_plain_words(spec: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_prompts(spec)


class NaTType(datetime):
    """pandas' own is a datetime of this name."""


class NAType:
    pass


FRAME = [{"prompt": "a", "answer": "x", "when": datetime(2024, 1, 2), "n": 1.0},
         {"prompt": "b", "answer": math.nan, "when": NaTType(1, 1, 1), "n": NAType()}]  # fmt: skip
WHOLE = [{"prompt": "a", "answer": "x", "when": datetime(2024, 1, 2), "n": 1.0},
         {"prompt": "b", "answer": None, "when": None, "n": None}]  # fmt: skip


@pytest.mark.parametrize("source", [Frame(FRAME), FRAME, pa.Table.from_pylist(WHOLE)])
def test_what_is_missing_in_a_table_is_none(source: Any) -> None:
    assert list(load_prompts(source).batch.rows()) == WHOLE


def test_a_data_frame_of_pandas_is_data() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": ["x", None], "n": [1, None]}, index=[7, 9])
    frame["when"] = [pandas.Timestamp("2024-01-02"), pandas.NaT]
    for source in (frame, frame.to_dict("records")):
        rows = list(load_prompts(source).batch.rows())
        assert [(row["prompt"], row["answer"], row["n"]) for row in rows] == [("a", "x", 1.0), ("b", None, None)]
        assert rows[1]["when"] is None
    assert load_prompts(frame["prompt"]).batch["prompt"] == ["a", "b"]
    pairs = pandas.DataFrame({"prompt": ["a"], "chosen": ["x"], "rejected": ["y"], "score": [math.nan]})
    assert OfflineDatasetLoader(pairs).batch["label"] == [1.0, 0.0]


class Rows(torch.utils.data.Dataset[dict[str, str]]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize("read", [load_prompts, OfflineDatasetLoader, stream_prompts])
@pytest.mark.parametrize(
    "splits", [{"train": Rows(), "test": Rows()}, {"train": [{"prompt": "a"}]}, {"train": iter([{"prompt": "a"}])}]
)
def test_of_several_splits_one_has_to_be_chosen(read: Any, splits: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"several sets of rows, \['?(test', ')?train'\]: choose one, data\['train'\]"):
        read(splits)


def test_a_message_without_content_is_named() -> None:
    chat = [{"role": "user", "content": math.nan}]
    with pytest.raises(DataError, match="row 0: column 'messages' is a chat with content nan, which is no text"):
        load_prompts([{"messages": chat}])


PICTURE = PIL.Image.new("RGB", (2, 2))
ASKED = {"prompt": "What is it?", "completion": "A dot."}


@pytest.mark.parametrize("read", [load_prompts, OfflineDatasetLoader])
@pytest.mark.parametrize(
    "more",
    [{"image": PICTURE}, {"scan": PICTURE}, {"pages": [PICTURE]}, {"images": ["a.png"]}, {"video": [[0, 1]]},
     {"scan": {"bytes": b"x", "path": None}}, {"sound": {"array": [0.1], "sampling_rate": 8, "path": ""}},
     {"image": torch.zeros(3, 2, 2)}],
)  # fmt: skip
def test_pictures_and_sounds_are_refused_by_name(read: Any, more: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"row 1: column '{next(iter(more))}' holds images or sounds"):
        read([ASKED, {**ASKED, **more}])
    (name,) = more
    assert read([ASKED, {**ASKED, name: None}]) is not None  # a row without


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, "text", {"text": 1}]
)
def test_parts_of_a_chat_that_are_no_text_are_refused_by_name(part: Any) -> None:
    seen = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    said = [{"role": "assistant", "content": "A dot."}]
    told = f"row 0.* is a chat with a part of type '{part.get('type', 'text') if isinstance(part, dict) else 'str'}'"
    with pytest.raises(DataError, match=told):
        load_prompts([{"messages": seen}])
    for row in ({"messages": seen + said}, {"prompt": seen, "completion": said}, {"messages": said + seen + said}):
        with pytest.raises(DataError, match=f"{told}|begins with the assistant"):
            OfflineDatasetLoader([row])


def test_a_table_adds_no_nulls_to_what_a_template_writes(tmp_path: Path) -> None:
    tools = [{"name": "a", "parameters": {"x": {"type": "int"}}}, {"name": "b", "parameters": {"y": {"type": "str"}}}]
    calls = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b", "arguments": {"y": "z"}}}]
    row = {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}], "tools": tools}
    table = pa.Table.from_pylist([row])
    pq.write_table(table, tmp_path / "rows.parquet")
    for source in (tmp_path / "rows.parquet", table, [row]):
        batch = load_prompts(source).batch
        assert json.loads(batch["messages"][0]) == row["prompt"] and batch["tools"][0] == tools


def test_variables_of_the_chat_template_are_for_each_chat_below_its_own() -> None:
    ask, own = [{"role": "user", "content": "x"}], ({}, {"a": 2, "b": None}, '{"c": 3}')
    chats = [{"messages": ask, "chat_template_kwargs": variables} for variables in own]
    seen = [json.loads(row["chat_template_kwargs"]) for row in rows_of(chats, chat_template_kwargs={"a": 1, "b": 1})]
    assert seen == [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1, "c": 3}]
    assert "chat_template_kwargs" not in rows_of(["text"], chat_template_kwargs={"a": 1})[0]
    row = {"prompt": ask, "completion": [{"role": "assistant", "content": "y"}]}
    recorded = OfflineDatasetLoader([row], chat_template_kwargs={"a": 1})
    assert json.loads(recorded.batch["chat_template_kwargs"][0]) == {"a": 1}
