"""`verl generate` and `verl chat`, as their user calls them."""

import fcntl
import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import verl.cli.generate
from verl.cli.main import app


def verl_command(*args, text=""):
    return CliRunner().invoke(app, list(map(str, args)), input=text)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    assert "6 of 6 responses" in result.stderr
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


def test_a_run_that_was_cut_off_goes_on_and_ends_the_same(tiny, tmp_path, monkeypatch):
    text = "".join(f"prompt number {i}\n\n" for i in range(20))
    whole, cut, part = (tmp_path / name for name in ("whole.parquet", "cut.parquet", "cut.parquet.part"))
    source = tmp_path / "prompts.txt"
    source.write_text(text)
    options = ("--max-new-tokens", 20, "--max-num-seqs", 3, "-n", 2)
    assert verl_command("generate", tiny, "-", whole, *options, text=text).exit_code == 0

    add = verl.cli.generate._Output.add

    def interrupted(self, answer):
        add(self, answer)
        if len(self.answers) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verl.cli.generate._Output, "add", interrupted)
        assert verl_command("generate", tiny, source, cut, *options).exit_code == 130
    assert not cut.exists()
    part.write_bytes(part.read_bytes()[:-7])  # as if killed in the middle of a line
    other = verl_command("generate", tiny, source, cut, *options, "--temperature", 0.5)
    assert other.exit_code == 2
    assert "temperature=1.0 (now 0.5)" in other.stderr

    result = verl_command("generate", tiny, source, cut, *options)
    assert result.exit_code == 0, result.output
    assert "40 of 40 responses" in result.stderr
    rows = pq.read_table(cut).to_pylist()
    assert len(rows) == 40
    assert rows == pq.read_table(whole).to_pylist()
    assert not part.exists()


def test_what_was_begun_without_an_answer_does_not_bind(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    wrong = verl_command("generate", tiny, "-", out, "--engine", "embeded", text="a prompt\n")
    assert (wrong.exit_code, "did you mean 'embedded'?; or" in wrong.stderr) == (2, True)
    result = verl_command("generate", tiny, "-", out, "--max-new-tokens", 3, text="another\n")
    assert result.exit_code == 0, result.output
    assert len(rows_of(out)) == 1


def test_two_do_not_write_one_file(tiny, tmp_path):
    out = tmp_path / "out.jsonl"
    with (tmp_path / "out.jsonl.part").open("a") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        result = verl_command("generate", tiny, "-", out, text="a prompt\n")
    assert (result.exit_code, "another process" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("prompts", "out", "code", "message"),
    [
        ("-", "out.csv", 2, "must be .jsonl or .parquet"),
        ("-", "made.jsonl", 2, "made.jsonl is there: give another name\n"),
        ("-", "taken/out.jsonl", 2, "cannot be written"),
        ("half.jsonl", "out.jsonl", 1, "no Unicode"),
        ("no.txt", "out.jsonl", 1, "no.txt cannot be read"),
        ("-", "out.jsonl", 2, "top_p must lie in"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(tmp_path, monkeypatch, prompts, out, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.jsonl").mkdir()
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "half.jsonl").write_text('{"prompt": "half \\ud800"}\n')
    top_p = 3 if "top_p" in message else 1
    result = verl_command("generate", "nowhere", prompts, tmp_path / out, "--top-p", top_p, text="a prompt\n")
    assert result.exit_code == code
    assert message in result.stderr


def test_chat_answers_each_line_of_a_pipe(tiny):
    def talk(text):
        options = ("--max-new-tokens", 30, "--temperature", 1, "--top-p", 1, "--system", "Be brief.")
        result = verl_command("chat", tiny, *options, text=text)
        assert result.exit_code == 0, result.output
        return result.stdout

    one, two = talk("Hello\n"), talk("Hello\n\nAnd then?\n")
    assert len(one.strip()) > 5
    assert two.startswith(one)
    assert len(two) > len(one)
    # The second line of a chat is answered with the first in mind, unless the chat starts over.
    assert talk("Hello\n/new\nAnd then?\n") != two


def test_chat_refuses_what_is_too_long_and_goes_on(tiny):
    result = verl_command("chat", tiny, "--max-new-tokens", 2, text=f"{'word ' * 5000}\nshort\n")
    assert result.exit_code == 0
    assert "/new starts over" in result.stderr
    assert result.stdout


def test_chat_reads_bytes_that_are_no_text(tiny):
    result = verl_command("chat", tiny, "--max-new-tokens", 2, text=b"\xff\xfe there\nshort\n")
    assert result.exit_code == 0, result.output
    assert result.stdout
