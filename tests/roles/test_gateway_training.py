"""An agent behind the gateway under an actor and a trainer: real engine, real updates, tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

import verl
from verl.config import load_config
from verl.errors import ConfigError, ModelError, RolloutError
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.turns import Turns
from verl.run.build import check_settings
from verl.run.train import train

pytest.importorskip("aiohttp")


def agent(base_url: str, api_key: str, row: Any) -> float:
    """Asks three times, each time with all that was said; its reward is the length of what the policy said."""
    chat, said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["prompt"]}], ""
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
        for turn in range(3):
            body = {"model": "gpt-4o", "messages": chat, "temperature": 0.1, "max_tokens": 4 + turn}
            answer = client.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()
            said += answer["choices"][0]["message"]["content"]
            chat += [answer["choices"][0]["message"], {"role": "user", "content": f"Go on, {turn}."}]
    return float(len(said))


def reward(completions: Any, episode_reward: list[float], **columns: Any) -> list[float]:
    return episode_reward


def actor_of(path: Path, **options: Any) -> verl.Actor:
    episode = Gateway(agent, chat_template="hermes")
    return verl.Actor.from_pretrained(
        str(path), optim={"lr": 1e-2}, episode=episode, sampling={"max_new_tokens": 8}, **options
    )


def test_log_probs_are_those_that_the_trainer_computes(tiny: Path) -> None:
    """In fp64, of every token that the policy sampled, over several turns."""
    actor = actor_of(tiny, dtype="float64")
    rows = actor.generate_sequences(["Once", "In the beginning"], n=2, key="k")
    assert rows["episode_error"] == [None] * 4 and None not in rows["episode_reward"]
    again = actor.compute_log_probs(rows)["log_probs"]
    trained = 0
    for row, log_probs in zip(rows.rows(), again, strict=True):
        assert bytes(actor.tokenizer.decode(row["prompt_tokens"]), "utf-8").startswith(b"<|im_start|>system\nBe brief.")
        for mask, engine, trainer in zip(row["response_mask"], row["rollout_log_probs"], log_probs, strict=True):
            assert not mask or math.isclose(engine, trainer, abs_tol=1e-9)
            trained += mask
        assert sum(row["response_mask"]) <= 4 + 5 + 6
    assert trained > 4 * 3


def test_a_trainer_learns_from_what_the_agent_returns(tiny: Path) -> None:
    actor = actor_of(tiny)
    trainer = verl.Trainer(actor, algorithm="grpo", n=4, log_dir=False)
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    for _ in range(3):
        log = trainer.step(["Once", "In the beginning"])
        assert log["updated"] and log["rollout/failed_episodes"] == 0 and log["reward/abstained"] == 0
        assert log["reward"] > 0
    assert any((old != new).any() for old, new in zip(before, actor.model.parameters(), strict=True))


def test_what_an_agent_says_comes_before_the_reward_of_the_trainer(tiny: Path) -> None:
    """Where it says nothing the trainer's reward is asked, if there is one; one that reads what it says decides."""

    def half(base_url: str, api_key: str, row: Any) -> float | None:
        said = agent(base_url, api_key, row)
        return said + 1.0 if row["prompt"] == "Once" else None

    def constant(completions: Any) -> list[float]:
        return [-1.0] * len(completions)

    def reading(completions: Any, episode_reward: list[float | None]) -> list[float]:
        return [-2.0] * len(completions)

    episode = Gateway(half, chat_template="hermes", max_left_out=1.0)
    actor = verl.Actor.from_pretrained(str(tiny), episode=episode, sampling={"max_new_tokens": 8})

    def rewards(**options: Any) -> list[Any]:
        trainer = verl.Trainer(actor, algorithm="grpo", n=2, log_dir=False, **options)
        return [*trainer.evaluate(["Once", "Twice"]).samples.select(["reward", "abstain_reason"]).rows()]

    said, none = rewards()
    assert said["reward"] > 0 and none["reward"] is None and "the agent returned no reward" in none["abstain_reason"]
    said, asked = rewards(reward=constant)
    assert said["reward"] > 0 and asked["reward"] == -1.0
    assert [row["reward"] for row in rewards(reward=reading)] == [-2.0, -2.0]


def test_an_episode_that_gives_no_reward_needs_one_beside_it(tiny: Path) -> None:
    async def silent(client: Any, row: Any) -> Any:
        return [Turns().wrote(await client.generate(row["prompt_tokens"]))]

    actor = verl.Actor.from_pretrained(str(tiny), episode=silent)
    with pytest.raises(ConfigError, match="needs a reward"):
        verl.Trainer(actor, algorithm="grpo", log_dir=False)


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["whole", "adapters"])
def test_the_starting_weights_stay_as_they_were(tiny: Path, lora: Any) -> None:
    """Beside a policy that is trained: the same question has the same answer of theirs, which is that of the model."""
    if lora is not None:
        pytest.importorskip("peft")
    said: list[tuple[str, list[float]]] = []

    def judged(base_url: str, api_key: str, row: Any) -> float:
        body = {"messages": [{"role": "user", "content": "Judge."}], "temperature": 0, "logprobs": True}
        with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            for model in ("judge", "policy"):
                answer = client.post(f"{base_url}/chat/completions", json={"model": model, **body}).raise_for_status()
                choice = answer.json()["choices"][0]
                if model == "judge":
                    tokens = choice["logprobs"]["content"]
                    said.append((choice["message"]["content"], [token["logprob"] for token in tokens]))
        return float(sum(map(ord, choice["message"]["content"])) % 7)

    episode = Gateway(judged, chat_template="hermes", models={"judge": "start"})
    options: Any = {"dtype": "float64", "optim": {"lr": 3e-2}, "sampling": {"max_new_tokens": 8}, "lora": lora}
    actor = verl.Actor.from_pretrained(str(tiny), episode=episode, **options)
    first = verl.Actor.from_pretrained(str(tiny), dtype="float64")
    trainer = verl.Trainer(actor, algorithm="grpo", n=4, log_dir=False)
    assert (actor.reference.model is None) == (lora is not None)  # a copy, or the model without its adapters
    logs = [trainer.step(["Once"]) for _ in range(3)]
    assert all(log["updated"] and log["calls/other/judge"] == 4 for log in logs) and len(said) == 12
    prompt = f"<|im_start|>user\nJudge.{actor.tokenizer.eos_token}\n<|im_start|>assistant\n"
    expected = first.generate_sequences([prompt], temperature=0.0, max_new_tokens=8)
    for text, numbers in said:
        assert text == expected["response"][0]
        assert numbers == pytest.approx(expected["rollout_log_probs"][0], abs=1e-9)
    moved = actor.compute_log_probs(expected.drop(["policy_id", "policy_version"]))["log_probs"][0]
    assert moved != pytest.approx(expected["rollout_log_probs"][0], abs=1e-3)  # as the policy has


def test_starting_weights_that_cannot_be_had_are_refused_by_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def actor() -> verl.Actor:
        episode = Gateway(agent, chat_template="hermes", models={"judge": "start"})
        return verl.Actor.from_pretrained(str(tiny), episode=episode, sampling={"max_new_tokens": 4})

    late, other, apart = actor(), actor(), actor()
    late.policy_version = 1
    with pytest.raises(ModelError, match=r"call make_reference\(\) before the first update"):
        late.generate_sequences(["Once"])
    other.make_reference(str(tiny))
    with pytest.raises(ConfigError, match="'start' is the reference policy, which is another model here"):
        other.generate_sequences(["Once"])
    monkeypatch.setattr(apart.controller, "is_local", False)
    with pytest.raises(ConfigError, match=r"'start' is for an actor in one process.*give its address"):
        apart.generate_sequences(["Once"])


def test_a_forced_call_is_a_call_and_only_its_choices_are_trained(tiny: Path) -> None:
    """A model of random weights, which would never call a tool by itself."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tool = {"type": "function", "function": {"name": "switch", "parameters": {**schema, "additionalProperties": False}}}

    def forcing(base_url: str, api_key: str, row: Any) -> float:
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "tool_choice": "required"}
        auth = {"Authorization": f"Bearer {api_key}"}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=auth, timeout=60).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        return float(json.loads(call["function"]["arguments"])["on"])

    episode = verl.Gateway(forcing, chat_template="hermes")
    actor = verl.Actor.from_pretrained(str(tiny), episode=episode, sampling={"max_new_tokens": 120})
    rows = actor.generate_sequences(["Once"], n=4, key="k")
    assert rows["episode_error"] == [None] * 4
    for row in rows.rows():
        # Of all these bytes the policy chose one: how the value begins.
        text = '<tool_call>\n{"name": "switch", "arguments": {"on": true}}\n</tool_call><|end|>'
        said = text if row["episode_reward"] else text.replace("true", "false")
        assert actor.tokenizer.decode(row["response_tokens"]) == said
        chosen = [token for token, mask in zip(row["response_tokens"], row["response_mask"], strict=True) if mask]
        assert actor.tokenizer.decode(chosen) == ("t" if row["episode_reward"] else "f")


def delegating(base_url: str, api_key: str, row: Any) -> Any:
    """Asks a sub-agent, whose reward is its own, and then goes on."""
    chat = [{"role": "user", "content": row["prompt"]}]
    judged = [{"role": "system", "content": "Judge."}, *chat]
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:

        def ask(messages: Any, **headers: str) -> Any:
            body = {"messages": messages, "max_tokens": 4}
            return client.post(f"{base_url}/chat/completions", json=body, headers=headers).raise_for_status().json()

        first = ask(chat)
        said = ask(judged, **{"X-Verl-Name": "judge"})["choices"][0]["message"]["content"]
        last = ask([*chat, first["choices"][0]["message"], {"role": "user", "content": "Go on."}])
    text = last["choices"][0]["message"]["content"]
    return {"reward": float(len(text)), "trajectories": {"judge": float(len(said))}, "calls": {first["id"]: 0.5}}


def test_an_episode_of_several_trajectories_is_trained_and_evaluated(tiny: Path) -> None:
    episode = Gateway(delegating, chat_template="hermes")
    actor = verl.Actor.from_pretrained(
        str(tiny), optim={"lr": 1e-2}, episode=episode, sampling={"max_new_tokens": 8}, dtype="float64"
    )
    rows = actor.generate_sequences(["Once", "In the beginning"], n=2, key="k")
    assert rows["id"] == [name for i in range(2) for n in range(2) for name in (f"k.{i}/{n}", f"k.{i}/{n}.1")]
    assert rows["episode"] == [f"k.{i}/{n}" for i in range(2) for n in range(2) for _ in range(2)]
    assert rows["trajectory"] == ["judge", None] * 4 and None in rows["trajectory_reward"]
    again = actor.compute_log_probs(rows)["log_probs"]
    for row, log_probs in zip(rows.rows(), again, strict=True):
        for mask, engine, trainer in zip(row["response_mask"], row["rollout_log_probs"], log_probs, strict=True):
            assert not mask or math.isclose(engine, trainer, abs_tol=1e-9)
    seen: list[Any] = []

    def reward(completions: Any, trajectories: Any, messages: Any, **columns: Any) -> list[float]:
        seen.append((trajectories, messages))
        return [0.0] * len(completions)

    reward.process = False  # type: ignore[attr-defined]
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)
    log = trainer.step(["Once", "In the beginning"])
    assert log["updated"] and log["episodes/trajectories"] == 2 and log["episodes/left_out"] == 0
    assert not seen and log["reward"] > 0  # the agent has said it
    silent = verl.Trainer(actor, reward_fn=_naming(reward), algorithm="grpo", n=4, log_dir=False)
    assert silent.evaluate(["Once"]).metrics["reward"] == 1.0
    assert len(silent.evaluate(["Once", "Twice"], n=2).samples) == 4  # one value an episode
    ((one,), (messages,)) = seen[0]
    assert [part["name"] for part in one] == ["judge", None] and one[1]["messages"] == messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]


def _naming(reward: Any) -> Any:
    """A reward that decides itself, for it reads what the agent says."""

    def named(completions: Any, episode_reward: Any, trajectories: Any, messages: Any) -> list[float]:
        return [value + 1.0 for value in reward(completions, trajectories, messages)]

    named.process = False  # type: ignore[attr-defined]
    return named


def test_too_many_episodes_that_are_left_out_end_the_run_by_name(tiny: Path) -> None:
    asked = iter(range(100))

    def failing(base_url: str, api_key: str, row: Any) -> float:
        number = next(asked)
        if number % 4:
            agent(base_url, api_key, row)
        if number % 4 == 1:
            raise ValueError("no tool of this name")
        return 1.0 * number

    def trainer_of(**options: Any) -> verl.Trainer:
        episode = Gateway(failing, chat_template="hermes", **options)
        actor = verl.Actor.from_pretrained(str(tiny), episode=episode, sampling={"max_new_tokens": 8})
        return verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False)

    log = trainer_of().step(["Once", "Twice"])
    assert (log["episodes/left_out"], log["episodes/left_out/no_call"], log["episodes/left_out/raised"]) == (4, 2, 2)
    assert log["updated"]
    with pytest.raises(RolloutError, match=r"4 of 8 episodes.*2 no_call.*more than max_left_out=0.4"):
        trainer_of(max_left_out=0.4).step(["Once", "Twice"])


AGENT = """
import httpx
import verl


def agent(base_url, api_key, row):
    auth = {"Authorization": f"Bearer {api_key}"}
    body = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 4}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=auth, timeout=60).json()
    return float(len(answer["choices"][0]["message"]["content"]))


gateway = verl.Gateway(agent, chat_template="hermes")
"""


@pytest.mark.slow
def test_settings_of_an_agent_need_no_reward(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n')
    settings: dict[str, Any] = {
        "data": {"train": "data.jsonl", "batch_size": 2},
        "actor_rollout_ref": {
            "model": {"path": str(tiny)},
            "rollout": {"episode": "agent.py:gateway", "max_new_tokens": 6, "n": 2},
        },
        "trainer": {"total_steps": 1, "output_dir": "run"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    config = load_config(tmp_path / "run.yaml")
    check_settings(config)
    train(config)
    record = json.loads(next((tmp_path / "run").rglob("metrics.jsonl")).read_text().splitlines()[0])
    assert record["reward/mean"] > 0 and record["episodes/left_out"] == 0
    settings["actor_rollout_ref"]["rollout"]["episode"] = "agent.py:agent"
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no reward is given"):
        check_settings(load_config(tmp_path / "run.yaml"))
