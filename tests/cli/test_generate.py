"""`verl generate`, as its user calls it."""

import base64
import datetime
import json
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from verl.cli.main import app


def verl_command(*args, text=""):
    return CliRunner().invoke(app, list(map(str, args)), input=text)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Once upon a time", "finish": "mine", "level": 1},
        {"messages": [{"role": "user", "content": "héllo"}], "level": 2},
        {"prompt_tokens": [9] * 5000, "level": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_in_completions_out(tiny, prompts, tmp_path):
    out = tmp_path / "deep" / "out.jsonl"
    result = verl_command("generate", tiny, prompts, out, "-n", 2, "--max-new-tokens", 5, "--stop", "never written")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    assert "4 of 6 responses are there; 1 of 3 prompts refused" in result.stderr
    rows = rows_of(out)
    assert [row["id"] for row in rows] == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]
    assert [row["level"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert (rows[0]["prompt"], rows[0]["user.finish"]) == ("Once upon a time", "mine")
    assert rows[2]["messages"] == [{"role": "user", "content": "héllo"}]
    assert all(row["finish"] in ("stop", "length") and len(row["response_tokens"]) <= 5 for row in rows[:4])
    assert {row["finish"] for row in rows[4:]} == {"refused"}
    assert "5000 tokens" in rows[5]["error"]
    assert rows[0]["response_tokens"] != rows[1]["response_tokens"]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]

    again = verl_command("generate", tiny, prompts, out)
    assert (again.exit_code, "--fresh" in again.stderr) == (2, True)
    assert verl_command("generate", tiny, prompts, out, "--max-new-tokens", 1, "--fresh").exit_code == 0
    assert len(rows_of(out)) == 3


def test_options_that_contradict_each_other_are_refused(tiny, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    both = verl_command("generate", tiny, prompts, out, "--system", "Be brief.", "--plain")
    assert (both.exit_code, "--plain makes none" in both.stderr) == (2, True)
    none = verl_command("generate", tiny, prompts, out, "--max-new-tokens", 0)
    assert none.exit_code == 2
    assert not out.exists()


def test_fresh_keeps_the_output_until_the_new_one_is_there(tiny, tmp_path):
    out = tmp_path / "out.jsonl"

    def command(model, *options):
        return verl_command("generate", model, "-", out, "--max-new-tokens", 3, *options, text="one\ntwo\nthree\n")

    assert command(tiny).exit_code == 0
    before = out.read_text()
    assert command("nowhere", "--fresh").exit_code == 1
    assert out.read_text() == before
    assert command(tiny).exit_code == 2  # and nothing is left that would make it go on
    assert list(tmp_path.iterdir()) == [out]
    result = command(tiny, "--seed", 1, "--fresh")
    assert result.exit_code == 0, result.output
    assert out.read_text() != before


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
@pytest.mark.parametrize("source", ["data/prompts.jsonl", "data", "link.jsonl"])
def test_the_output_keeps_apart_from_the_prompts(tiny, tmp_path, source, fresh):
    prompts = tmp_path / "data" / "prompts.jsonl"
    prompts.parent.mkdir()
    prompts.write_text('{"prompt": "mine"}\n')
    (tmp_path / "link.jsonl").symlink_to(prompts)
    out = prompts.with_name("out.jsonl") if source == "data" else prompts
    result = verl_command("generate", tiny, tmp_path / source, out, *fresh)
    assert result.exit_code == 2
    assert "where the prompts are read from" in result.stderr
    assert "--fresh" not in result.stderr
    assert [path.name for path in prompts.parent.iterdir()] == ["prompts.jsonl"]
    assert prompts.read_text() == '{"prompt": "mine"}\n'


MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9)
CHATS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": "yo"}]}]]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_column_that_can_be_read_can_be_written(tiny, tmp_path, suffix):
    source, out = tmp_path / "in.parquet", tmp_path / f"out.{suffix}"
    rows = [{"prompt": "hi", "when": MOMENT, "day": MOMENT.date(), "blob": b"\x89PNG", "info": {"more": [b"x"]}}] * 2
    pq.write_table(pa.Table.from_pylist(rows), source)
    result = verl_command("generate", tiny, source, out, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    if suffix == "jsonl":
        row = rows_of(out)[1]
        assert (row["when"], row["day"]) == (MOMENT.isoformat(), "2024-05-06")
        assert (base64.b64decode(row["blob"]), base64.b64decode(row["info"]["more"][0])) == (b"\x89PNG", b"x")
    else:
        row = pq.read_table(out).to_pylist()[1]
        assert {key: row[key] for key in rows[0]} == rows[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_parquet_has_no_type_for(tiny, tmp_path, suffix):
    source, out = tmp_path / "in.jsonl", tmp_path / f"out.{suffix}"
    rows = [{"messages": chat, "extra_info": {}, "deep": {"level": 1, "none": [{}]}} for chat in CHATS]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = verl_command("generate", tiny, source, out, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    if suffix == "jsonl":
        found = rows_of(out)
        assert [{key: row[key] for key in rows[0]} for row in found] == rows
    else:
        found = pq.read_table(out).to_pylist()
        assert [json.loads(row["messages"]) for row in found] == CHATS
        assert "JSON text, since no type of Parquet holds all its values: extra_info, deep, messages" in result.output
        assert [(row["extra_info"], row["deep"]) for row in found] == [({}, rows[0]["deep"])] * 2


def test_chats_of_one_form_are_lists_in_parquet(tiny, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS[:1] * 2))
    assert verl_command("generate", tiny, source, out, "--max-new-tokens", 2).exit_code == 0
    assert pq.read_table(out)["messages"].to_pylist() == CHATS[:1] * 2


def test_lines_end_at_newlines_only(tiny, tmp_path):
    text = b"\xef\xbb\xbfone\xe2\x80\xa8still one\r\n \r\ntwo\x0cstill\rtwo\n"
    source = tmp_path / "in.txt"
    source.write_bytes(text)
    for prompts, name in ((source, "file.jsonl"), ("-", "pipe.jsonl")):
        result = verl_command("generate", tiny, prompts, tmp_path / name, "--max-new-tokens", 1, text=text)
        assert result.exit_code == 0, result.output
        found = [row["prompt"] for row in rows_of(tmp_path / name)]
        assert found == ["one\u2028still one", "two\x0cstill\rtwo"]


def test_a_full_disk_is_told(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    lines = "".join(f"prompt {i} {'and so on' * 30}\n" for i in range(20))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, unlimited[1]))
    try:
        result = verl_command("generate", tiny, "-", out, "--max-new-tokens", 4, text=lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (result.exit_code, "out.jsonl cannot be written" in result.stderr) == (2, True), result.output
    assert not list(tmp_path.iterdir())


def test_all_prompts_refused_is_a_failure(tiny, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt_tokens": [9] * 5000}) + "\n")
    result = verl_command("generate", tiny, source, tmp_path / "out.jsonl", "-n", 2)
    assert result.exit_code == 1
    assert "0 of 2 responses are there; 1 of 1 prompts refused" in result.stderr
    assert "error:" in result.stderr
    assert [row["finish"] for row in rows_of(tmp_path / "out.jsonl")] == ["refused"] * 2


@pytest.mark.parametrize(
    ("prompts", "out", "code", "message"),
    [
        ("-", "out.csv", 2, "must be .jsonl or .parquet"),
        ("-", "made.jsonl", 2, "made.jsonl is there: give another name\n"),
        ("-", "taken/out.jsonl", 2, "cannot be written"),
        ("half.jsonl", "out.jsonl", 1, "not valid Unicode"),
        ("big.jsonl", "out.jsonl", 1, "column 'n' has a whole number of more than 64 bits in row 1"),
        ("folder", "out.jsonl", 1, "folder/x.jsonl is not a regular file"),
        ("no.txt", "out.jsonl", 1, "no.txt cannot be read"),
        ("empty.txt", "out.jsonl", 1, "empty.txt has no lines"),
        ("-", "out.jsonl", 2, "top_p: must be at most 1"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(tmp_path, monkeypatch, prompts, out, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.jsonl").mkdir()
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "half.jsonl").write_text('{"prompt": "half \\ud800"}\n')
    (tmp_path / "big.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "n": {10**30}}}\n')
    (tmp_path / "folder" / "x.jsonl").mkdir(parents=True)
    (tmp_path / "empty.txt").write_text("\n")
    top_p = 3 if "top_p" in message else 1
    result = verl_command("generate", "nowhere", prompts, tmp_path / out, "--top-p", top_p, text="a prompt\n")
    assert result.exit_code == code
    assert message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
