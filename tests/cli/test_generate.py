"""`verl generate`, as its user calls it."""

import base64
import datetime
import fcntl
import json
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import verl.cli.generate
from verl.cli.main import app
from verl.durable import staging_of


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


@pytest.fixture
def cut_after(monkeypatch):
    """The next `generate` is interrupted after so many answers."""
    add = verl.cli.generate._Part.add

    def cut(count):
        def interrupted(self, answer):
            add(self, answer)
            if len(self.answers) == count:
                monkeypatch.setattr(verl.cli.generate._Part, "add", add)
                raise KeyboardInterrupt

        monkeypatch.setattr(verl.cli.generate._Part, "add", interrupted)

    return cut


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


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_and_ends_the_same(tiny, tmp_path, cut_after):
    text = "".join(f"prompt number {i}\n\n" for i in range(20))
    whole, cut, part = (tmp_path / name for name in ("whole.parquet", "cut.parquet", "cut.parquet.part"))
    source = tmp_path / "prompts.txt"
    source.write_text(text)
    options = ("--max-new-tokens", 20, "--max-num-seqs", 3, "-n", 2)
    assert verl_command("generate", tiny, "-", whole, *options, text=text).exit_code == 0

    cut_after(9)
    assert verl_command("generate", tiny, source, cut, *options).exit_code == 130
    assert not cut.exists()
    part.write_bytes(part.read_bytes()[:-7])  # as if killed in the middle of a line
    kept = {json.loads(line)["id"] for line in part.read_text().splitlines()[1:-1]}
    assert len(kept) == 8
    staging_of(tmp_path / "other.parquet").touch()  # and as if killed while it wrote an output
    other = verl_command("generate", tiny, source, cut, *options, "--temperature", 0.5)
    assert other.exit_code == 2
    assert "temperature=1.0 (now 0.5)" in other.stderr

    result = verl_command("generate", tiny, source, cut, *options)
    assert result.exit_code == 0, result.output
    assert "40 of 40 responses" in result.stderr
    rows = pq.read_table(cut).to_pylist()
    assert len(rows) == 40
    assert rows == pq.read_table(whole).to_pylist()
    new = sum(len(row["response_tokens"]) for row in rows if row["id"] not in kept)
    assert f"\n{new:,} tokens, " in f"\n{result.stderr}"  # what was there is not generated again
    assert {*tmp_path.iterdir()} == {source, whole, cut}


def test_fresh_keeps_the_output_until_the_new_one_is_there(tiny, tmp_path, cut_after):
    out = tmp_path / "out.jsonl"

    def command(model, *options):
        return verl_command("generate", model, "-", out, "--max-new-tokens", 3, *options, text="one\ntwo\nthree\n")

    assert command(tiny).exit_code == 0
    before = out.read_text()
    assert command("nowhere", "--fresh").exit_code == 1
    assert out.read_text() == before
    assert command(tiny).exit_code == 2  # and nothing is left that would make it go on
    assert list(tmp_path.iterdir()) == [out]

    cut_after(2)
    assert command(tiny, "--seed", 1, "--fresh").exit_code == 130
    assert command("nowhere", "--seed", 1, "--fresh").exit_code == 1  # and this costs no answer either
    assert out.read_text() == before
    assert "seed=1 (now 0)" in command(tiny).stderr
    result = command(tiny, "--seed", 1)
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


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((), ("--system", "Rhyme."), "system_prompt=None (now Rhyme.)"),
        (("--system", "Rhyme."), ("--system", "Rhyme!"), "system_prompt=Rhyme. (now Rhyme!)"),
        ((), ("--chat",), "chat=None (now True)"),
        ((), ("--prompt-column", "question"), "prompt_column=None (now question)"),
        ((), None, "prompts="),
    ],
)
def test_other_prompts_do_not_go_on_with_what_was_begun(tiny, tmp_path, cut_after, before, after, told):
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": f"prompt {i}", "question": f"question {i}"} for i in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("generate", tiny, source, tmp_path / "out.jsonl", "--max-new-tokens", 2)
    cut_after(2)
    assert verl_command(*command, *before).exit_code == 130
    if after is None:  # a space more is another prompt
        source.write_text(source.read_text().replace("prompt 2", "prompt 2 "))
    result = verl_command(*command, *(after or ()))
    assert (result.exit_code, told in result.stderr) == (2, True), result.output


def test_a_link_that_leads_to_another_model_does_not_go_on(make_tiny, tmp_path, cut_after):
    latest = tmp_path / "latest"
    latest.symlink_to(make_tiny())
    command = ("generate", latest, "-", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    cut_after(1)
    assert verl_command(*command, text="one\ntwo\n").exit_code == 130
    latest.unlink()
    latest.symlink_to(make_tiny(seed=1))
    assert verl_command(*command, text="one\ntwo\n").exit_code == 2


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


def test_a_full_disk_is_told_and_the_same_command_goes_on(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    lines = "".join(f"prompt {i} {'and so on' * 30}\n" for i in range(20))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (800, 5000):  # too small for the part file; and for the output, which holds the prompts too
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
        try:
            result = verl_command("generate", tiny, "-", out, "--max-new-tokens", 4, "--temperature", 0, text=lines)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert result.exit_code == 2, result.output
        assert "out.jsonl cannot be written" in result.stderr
        assert "the same command without --fresh goes on" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.part"]
    assert len(rows_of(out.with_name("out.jsonl.part"))) == 21
    result = verl_command("generate", tiny, "-", out, "--max-new-tokens", 4, "--temperature", 0, text=lines)
    assert (result.exit_code, len(rows_of(out))) == (0, 20)


def test_all_prompts_refused_is_a_failure(tiny, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt_tokens": [9] * 5000}) + "\n")
    result = verl_command("generate", tiny, source, tmp_path / "out.jsonl", "-n", 2)
    assert result.exit_code == 1
    assert "0 of 2 responses are there; 1 of 1 prompts refused" in result.stderr
    assert "error:" in result.stderr
    assert [row["finish"] for row in rows_of(tmp_path / "out.jsonl")] == ["refused"] * 2


@pytest.mark.parametrize("lines", ["[]\n{}\n", "{}\n{}\n", "{}\n[]\n", "no\nJSON\n"])
def test_a_damaged_part_file_is_told(tmp_path, lines):
    (tmp_path / "out.jsonl.part").write_text(lines)
    result = verl_command("generate", "nowhere", "-", tmp_path / "out.jsonl", text="a prompt\n")
    assert (result.exit_code, "is damaged" in result.stderr) == (1, True), result.output


def test_what_was_begun_without_an_answer_does_not_bind(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    wrong = verl_command("generate", tiny, "-", out, "--engine", "embeded", text="a prompt\n")
    assert (wrong.exit_code, "did you mean 'embedded'?; or" in wrong.stderr) == (2, True)
    assert not list(tmp_path.iterdir())
    result = verl_command("generate", tiny, "-", out, "--max-new-tokens", 3, text="another\n")
    assert result.exit_code == 0, result.output
    assert len(rows_of(out)) == 1


def test_two_do_not_write_one_file(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    with (tmp_path / "out.jsonl.part").open("a") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        result = verl_command("generate", tiny, "-", out, text="a prompt\n")
    assert (result.exit_code, "another process" in result.stderr) == (2, True)
    assert (tmp_path / "out.jsonl.part").exists()  # which is the other one's


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
    assert not list(tmp_path.rglob("*.part"))
