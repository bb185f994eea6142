"""`verl agent check`: what would be trained of agents and environments, before anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verl.cli.main import app

AGENTS = '''
import json, os, sys, urllib.request

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


def ask(base_url, api_key, messages, **more):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 4, **more}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]


def linked(base_url, api_key, row):
    chat = [{"role": "user", "content": row["prompt"]}]
    tools = [{"type": "function", "function": TOOL}]
    chat += [ask(base_url, api_key, chat, tools=tools), {"role": "user", "content": "Sure?"}]
    ask(base_url, api_key, chat, tools=tools)
    return 0.5


def rewritten(base_url, api_key, row):
    for text in ("one", "two"):
        ask(base_url, api_key, [{"role": "user", "content": text}])


def titled(base_url, api_key, row):
    tools = [{"type": "function", "function": TOOL}]
    ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}], tools=tools)
    ask(base_url, api_key, [{"role": "system", "content": row["system"]}, {"role": "user", "content": row["prompt"]}])
    return 1.0


def silent(base_url, api_key, row):
    return 1.0


def excluded(base_url, api_key, row):
    ask(base_url, api_key, [{"role": "user", "content": "x"}], n=1)
    raise ValueError("by the agent")


class Game:
    def reset(self, secret, **row):
        return f" It is {secret}."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: a number
        """
        return "no"

    def get_reward(self):
        return 2.0


if __name__ == "__main__":
    row = json.loads(sys.stdin.read())
    ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [{"role": "user", "content": row["prompt"]}])
    print(0.25)
'''


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    return path


def check(tiny: Path, spec: str, *more: str, row: Any = None) -> Any:
    asked = ["agent", "check", spec, "--model", str(tiny), "--max-new-tokens", "8"]
    rows = ["--row", json.dumps(row or {"prompt": "Q"})] if "--prompts" not in more else []
    return CliRunner().invoke(app, [*asked, *rows, "--chat-template", "hermes", *more])


def as_json(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_an_agent_is_shown_with_what_is_trained(tiny: Path, agents: Path) -> None:
    result = check(tiny, f"{agents}:linked", "--json")
    assert result.exit_code == 0, result.output
    (episode,) = as_json(result)
    (parts,) = episode["conversations"]
    assert [part["trained"] for part in parts][:4] == [False, True, False, True]
    assert episode["reward"] == 0.5 and episode["calls"] == 2 and episode["left_out"] is None and episode["trained"]
    assert "Sure?" in parts[2]["text"] and sum(part["tokens"] for part in parts if part["trained"]) <= 8
    result = check(tiny, f"{agents}:linked")
    assert "\n+ " in result.stdout and "reward 0.5" in result.stdout and "Sure?" in result.stdout


def test_a_script_is_a_command_of_its_own(tiny: Path, agents: Path) -> None:
    (episode,) = as_json(check(tiny, str(agents), "--json"))
    assert (episode["reward"], episode["calls"], episode["trained"]) == (0.25, 1, True)


def test_calls_that_are_not_linked_are_named(tiny: Path, agents: Path) -> None:
    result = check(tiny, f"{agents}:rewritten", "--json")
    (episode,) = as_json(result)
    assert len(episode["conversations"]) == 2 and result.exit_code == 0
    assert any("message 1 is user 'two', and was user 'one'" in warning for warning in episode["warnings"])
    assert any("it says no reward" in warning for warning in episode["warnings"])


@pytest.mark.parametrize(
    ("system", "is_named"),
    [
        ("Write a title of at most five words for this conversation.", True),
        ("Summarize what was said so far.", True),
        ("Plan how to answer. Answer with the steps.", False),
    ],
)
def test_calls_for_titles_are_trained_and_named(tiny: Path, agents: Path, system: str, is_named: bool) -> None:
    result = check(tiny, f"{agents}:titled", "--json", row={"prompt": "Q", "system": system})
    (episode,) = as_json(result)
    assert len(episode["conversations"]) == 2 and episode["calls_left_out"] == {}
    named = [warning for warning in episode["warnings"] if "call 2 looks like one for a title" in warning]
    assert bool(named) == is_named and all("X-Verl-Train: 0" in warning for warning in named)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("silent", "the agent made no call"), ("excluded", "the agent raised: ValueError: by the agent")],
)
def test_what_would_be_left_out_fails(tiny: Path, agents: Path, name: str, reason: str) -> None:
    result = check(tiny, f"{agents}:{name}", "--json")
    (episode,) = as_json(result)
    assert result.exit_code == 1 and reason in episode["left_out"] and not episode["trained"]


def test_environments(tiny: Path, agents: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "Guess."}]
    rows.write_text("\n".join(json.dumps({"prompt": chat, "secret": number}) for number in range(4)))
    result = check(tiny, f"{agents}:Game", "--json", "--prompts", str(rows), "-n", "2")
    episodes = as_json(result)
    assert result.exit_code == 0 and [episode["reward"] for episode in episodes] == [2.0, 2.0]
    for number, episode in enumerate(episodes):
        assert f"Guess. It is {number}." in episode["conversations"][0][0]["text"] and episode["calls"] is None


def test_wrong_settings(tiny: Path, agents: Path) -> None:
    runner = CliRunner()
    for arguments, message in (
        ([f"{agents}:linked"], "give --prompts FILE or --row"),
        ([f"{agents}:linked", "--row", "["], "--row is no JSON"),
        ([f"{agents}:linked", "--row", "[1]"], "--row is an object"),
        ([f"{agents}:lnked", "--row", '{"prompt": "Q"}'], "did you mean 'linked'"),
        (["gone.py", "--row", '{"prompt": "Q"}'], "gone.py does not exist"),
        ([f"{agents}:linked", "--row", '{"prompt": "Q"}', "--model", str(tiny)], "does not show the tools"),
    ):
        result = runner.invoke(app, ["agent", "check", *arguments])
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    shown = runner.invoke(app, ["agent", "check", "--help"]).output
    assert "Exit code 0" in shown and "--json" in shown
