"""Scoring services and judges behind real servers: what comes back, what is tried elsewhere, what abstains."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable

import pytest

import verl
from tests.conftest import Plain
from verl._host.http_servers import ServerPool
from verl.config import Config
from verl.errors import ConfigError, RewardError
from verl.rewards.remote import JudgeReward


def rows(*texts: str, chat: bool = False) -> verl.Batch:
    ids = [str(row) for row in range(len(texts))]
    prompts = (
        {"messages": [json.dumps([{"role": "user", "content": [{"type": "text", "text": "Why?"}]}])] * len(texts)}
        if chat
        else {"prompt": ["Why?"] * len(texts)}
    )
    given = {"id": ids, "response": list(texts), "response_tokens": [[1]] * len(texts), "hint": ["sky"] * len(texts)}
    return verl.Batch.from_columns({**given, **prompts})


@pytest.mark.parametrize("bad", ["hang", "error", "nonsense"])
def test_a_service_scores_in_parts_and_elsewhere(serve: Callable[..., Plain], bad: str) -> None:
    urls = [f"{server.url}/score" for server in (serve(1, bad), serve(2))]
    reward = verl.Reward(url=urls, batch_size=2, timeout=1.5 if bad == "hang" else 20.0)
    scored = reward.get_reward(rows("a", "bb", "mumble", "dddd", "eeeee"))
    assert scored["reward"] == [1.0, 2.0, None, 4.0, 5.0]


@pytest.mark.parametrize("path", ["", "/generate"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_judge_reads_the_template_and_its_score_is_parsed_out(
    serve: Callable[..., Plain], path: str, chat: bool
) -> None:
    server = serve(1)
    template = '{"json": {prompt}|{response}|{hint}|{unknown}}'
    worker = verl.vLLMWorker(api_url=server.url + path, template=template, scale=(0, 100))
    expected = len('{"json": Why?|yes|sky|{unknown}}')
    batch = rows("yes", "mumble", chat=chat)
    for reward in (verl.Reward(worker), verl.Reward(url=server.url + path, template=template, scale=(0, 100))):
        scored = reward.get_reward(batch)
        assert scored["reward"] == [expected, None]
        assert "gave no score" in scored["abstain_reason"][1]
    assert worker.get_reward(batch)["reward"] == [expected, None]
    halved = verl.vLLMWorker(server.url + path, template=template, parse=lambda said: len(said.split(":")[-1]) / 2)
    assert halved.get_reward(rows("yes", chat=chat))["reward"] == [1.5]


def test_a_judge_at_generate_is_asked_as_a_chat_where_there_is_no_generate(serve: Callable[..., Plain]) -> None:
    urls = [f"{server.url}/generate" for server in (serve(1, "described"), serve(2))]
    worker = verl.vLLMWorker(api_url=urls, template="{prompt}|{response}", scale=(0, 100))
    assert worker.get_reward(rows(*["yes"] * 20))["reward"] == [float(len("Why?|yes"))] * 20


def test_what_a_judge_cannot_do_abstains_or_ends_the_run(serve: Callable[..., Plain]) -> None:
    judge = JudgeReward(serve(1).url, retries=0, template="{response}", default_reward=-1.0, max_failure_rate=0.9)
    scored = verl.Reward(judge).get_reward(rows("crash", "fine"))
    assert scored["reward"] == [-1.0, 4.0]
    assert "500" in scored["abstain_reason"][0]
    dead = serve(2)
    dead.kill()
    strict = verl.Reward(url=dead.url, template="{response}", retries=0, timeout=2.0)
    with pytest.raises(RewardError, match="failed on 64 of the latest 64"):
        strict.get_reward(rows(*["x"] * 64))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("said", "score"),
    [
        *[("Score: 7", 7), ("Score:-1", -1), ("Score: -0.5", -0.5), ("score = .5", 0.5), ("**Score:** +3", 3)],
        *[("Score (0-10): 7/10", 7), ('{"score": 4.25}', 4.25), ("final_score: 2", 2), ("Score: \u22123", -3)],
        *[
            ("Score: 1. On second thought, Score: 9.", None),
            ("Score: 10.", 10),
            ("Score: 10/10", 10),
            ("Score: 5e-1", 0.5),
        ],
        *[("Score: 7 out of 10", 7), ("**Score**: **7** / **10**", 7), ("Score: 7 of 10.0", 7), ("Score: 0", 0)],
        *[("Score: 0-10", None), ("Score: 10 - 20", None), ("Score - 7", None), ("I scored 7", None)],
        *[("Score: N", None), ("Score: nan", None), ("Score: inf", None), ("Score: 7%", None), ("Score: 7 %", None)],
        *[
            ("Score: 1e9", None),
            ("Score: 1e400", None),
            ("Score: 1,000", None),
            ("Score: 11", None),
            ("Score: -10.5", None),
        ],
        *[
            ("<think>Score: 9?</think> Score: 2", 2),
            ("Score: 2? Or 9.</think>None", None),
            ("<think>Score: 9, as", None),
        ],
        *[("Score: 85/100", None), ("Score: 4/5", None), ("Score: 7 out of 100", None), ("Score: 7th", None)],
    ],
)
def test_what_a_judge_says_is_read_with_its_sign(serve: Callable[..., Plain], said: str, score: float | None) -> None:
    judge = verl.Reward(url=serve(1).url, template="{response}", scale=(-10, 10))
    assert judge.get_reward(rows(f"say {said}"))["reward"] == [score]


#: What a judge says of a response that asks it to write "Score: 10", and what it has given.
QUOTES = [
    ('Score: 2\nThe response asks me to write "Score: 10".', 2),
    ('The response says "Score: 10", and is wrong.\nScore: 1', 1),
    ("> Score: 10\n\nThat is what it wants.\n**Score: 0**", 0),
    ("It says Score: 10", None),
    ("As asked: Score: 10", None),
    ('"Score: 10" is what it asks for.', None),
    ('Score: 3. It asks for "Score: 10".', None),
    ("Score: 3\nIt asks for:\nScore: 10", None),
    ("Score: 10\nI was asked to begin so.\nScore: 3", None),
    ("Score: 4\nIn short:\nScore: 4", 4),
    ("- Score: 5", 5),
    ("## Final score: 6/10", 6),
    ('{"reason": "fine",\n "score": 6.5}', 6.5),
    ("Good.\nScore\uff1a8", 8),
    ("Good.\nScore: \uff18", 8),
    ("\uff33\uff43\uff4f\uff52\uff45\uff1a\uff11\uff10\uff0f\uff11\uff10", 10),
]


@pytest.mark.parametrize(("said", "score"), QUOTES, ids=[repr(said) for said, _ in QUOTES])
def test_a_response_that_asks_to_be_quoted_is_not_rewarded(said: str, score: float | None) -> None:
    judge = JudgeReward("http://127.0.0.1:1", template="{response}")
    found = judge._parsed(said)
    assert found.value == score and (score is not None or "the judge gave" in str(found.reason))


def test_a_judge_stays_in_its_scale_which_is_0_to_10(serve: Callable[..., Plain]) -> None:
    said, url = rows("say Score: 10", "say Score: -1", "say Score: 10.01", "say Score: 0.75"), serve(1).url
    scored = verl.Reward(url=url, template="{response}").get_reward(said)
    assert scored["reward"] == [10.0, None, None, 0.75]
    assert "score -1 is not on the scale 0 to 10" in scored["abstain_reason"][1]
    shares = verl.Reward(url=url, template="{response}", scale=(0, 1)).get_reward(said)
    assert shares["reward"] == [None, None, None, 0.75]
    own = verl.Reward(url=url, template="{response}", parse=lambda text: {"score": float(text.split()[-1]), "more": 1})
    assert own.get_reward(said)["reward"] == [10.0, None, None, 0.75]
    outside = verl.Reward(url=url, template="{response}", default_reward=-1.0, max_failure_rate=1.0)
    assert outside.get_reward(rows("say Score: 85/100"))["reward"] == [-1.0]


def test_a_judge_that_is_never_in_its_scale_ends_the_run_by_name(serve: Callable[..., Plain]) -> None:
    reward = verl.Reward(url=serve(1).url, template="{response}")
    with pytest.raises(RewardError, match=r"'judge' failed on 64 of the latest 64 .*not on the scale 0 to 10"):
        reward.get_reward(rows(*["say Score: 77"] * 64))


def test_what_cannot_be_read_of_one_answer_leaves_the_others(serve: Callable[..., Plain]) -> None:
    url, batch = serve(1).url, rows("say Grade: 3", "say Grade: n/a", "say Grade: 5")
    for parse in (r"Grade: (\S+)", lambda said: float(said.split()[-1])):
        scored = verl.Reward(url=url, template="{response}", parse=parse).get_reward(batch)
        assert scored["reward"] == [3.0, None, 5.0]
        assert "cannot be read (ValueError" in scored["abstain_reason"][1]


def test_a_request_that_hangs_is_late_alone(serve: Callable[..., Plain]) -> None:
    reward = verl.Reward(url=f"{serve(1).url}/score", batch_size=1, timeout=1, retries=0)
    assert reward.get_reward(rows("a", "hang", "ccc"))["reward"] == [1.0, None, 3.0]


def test_columns_that_are_no_json_are_named() -> None:
    columns = {"id": ["a", "b"], "prompt": ["Why?"] * 2, "response": ["x"] * 2, "response_tokens": [[1]] * 2}
    batch = verl.Batch.from_columns({**columns, "when": [1.0, float("nan")]})
    scored = verl.Reward(url="http://localhost:1/score", retries=0).get_reward(batch)
    assert scored["reward"] == [None, None]
    assert "column 'when' cannot be sent as JSON" in scored["abstain_reason"][1]


@pytest.mark.parametrize("key", ["é", "two\nlines"])
def test_a_key_that_no_header_carries_is_refused_before_any_call(key: str) -> None:
    for make in (
        lambda: verl.Reward(url="http://127.0.0.1:9/score", api_key=key),
        lambda: verl.Reward(url="http://127.0.0.1:9/v1", template="{response}", api_key=key),
        lambda: verl.vLLMWorker("http://127.0.0.1:9", api_key=key),
        lambda: ServerPool("http://127.0.0.1:9", api_key=key),
    ):
        with pytest.raises(ConfigError, match="api_key has a character that no HTTP header can carry") as refused:
            make()
        assert key not in str(refused.value)


def test_a_service_is_freed_with_its_reward(serve: Callable[..., Plain]) -> None:
    reward = verl.Reward(url=f"{serve(1).url}/score")
    assert reward.get_reward(rows("a"))["reward"] == [1.0]
    freed = weakref.ref(reward.source)
    del reward
    gc.collect()
    assert freed() is None


def test_wrong_settings_are_told(serve: Callable[..., Plain]) -> None:
    with pytest.raises(ConfigError, match=r"must contain \{response\}"):
        verl.vLLMWorker("http://localhost:1", template="{prompt}")
    for parse in ("[0-9]+", "("):
        with pytest.raises(ConfigError, match="regular expression with a group"):
            verl.vLLMWorker("http://localhost:1", parse=parse)
    with pytest.raises(ConfigError, match="servers of models are addresses"):
        verl.Reward(url="http://localhost:1/proxy", template="{response}")
    with pytest.raises(ConfigError, match="has no option 'temperatur'"):
        verl.Reward(url="http://localhost:1", template="{response}", temperatur=1)
    for scale in ((0, 0), (10, 0), (0, float("nan")), (0, float("inf")), 10, (0, 5, 10), "ab"):
        with pytest.raises(ConfigError, match=r"JudgeReward\.scale"):
            verl.vLLMWorker("http://localhost:1", template="{response}", scale=scale)
    policy = {"model": {"path": "m"}}
    with pytest.raises(ValueError, match="it needs url"):
        Config(actor_rollout_ref=policy, reward={"template": "{response}"})
    with pytest.raises(ValueError, match=r"leave rollout\.name=hf out"):
        Config(actor_rollout_ref={**policy, "rollout": {"name": "hf", "url": "http://localhost:1"}})
    Config(actor_rollout_ref={**policy, "rollout": {"name": "vllm", "url": ["http://a:1", "http://b:1"]}})
