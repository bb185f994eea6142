"""An agent as an episode: it runs against the gateway, and the policy's replies are trained.

actor = Actor(model, episode=Gateway(agent))

def agent(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    ...
    return 1.0  # the episode's reward
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl._base.checked import checked
from verl._base.record import Count, Portion, Seconds
from verl._base.secrets import key_of, masked
from verl._host.user_calls import LateError, within
from verl.data.chat import template_inputs
from verl.errors import ConfigError, VerlError, nearest
from verl.rollout.episode import Client, EndOfRunError, FailedEpisodeError, Row
from verl.rollout.gateway import agents
from verl.rollout.gateway.agents import AgentError, AgentResult, KilledError
from verl.rollout.gateway.linking import Call, Trajectory, trajectories
from verl.rollout.gateway.server import Listener, listening
from verl.rollout.gateway.session import START, Session
from verl.rollout.gateway.template import ChatTemplate, template_of
from verl.rollout.turns import Turns
from verl.sandbox import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeRecord:
    """What an agent did with its row.

    Attributes:
        trajectories: what is trained, see `linking.trajectories`.
        result: what the agent said of it.
        calls: all that were answered, with the reason of those that are left out.
        excluded: calls that are not trained, by reason.
        others: how many requests other models have answered, by name; these are no calls.
        truncated: whether a bound, or the model's context, was used up.
    """

    trajectories: list[Trajectory]
    result: AgentResult
    calls: list[Call]
    excluded: Mapping[str, int]
    truncated: bool
    others: Mapping[str, int] = field(default_factory=dict)


class Gateway:
    """An agent that knows no more than the address of an endpoint.

    It is a function `(base_url, api_key, row)`, plain or async, which returns the episode's reward, None, or a mapping
    with `reward`; a command, which gets `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY` in its environment and the row as JSON on its stdin, and whose last line of stdout is what it
    returns, if that is JSON; or the address of one that runs on this machine.

    An agent that is killed, late, or fails with the gateway runs once more. One that raises is left out.

    Args:
        chat_template: in place of the tokenizer's: "hermes", or a file.
        deadline: seconds for one run of the agent.
        max_calls, max_tokens: of an episode: replies of the policy, and tokens that it samples.
        on_agent_error: the reward of an episode whose agent raises; None: it is left out. The policy may be the cause.
        train: whether a call that was answered is trained, whatever its header says; None: all are, but those whose
            header `X-Verl-Train` is 0.
        environment: more variables for a command.
        max_left_out: share of a step's episodes; where more count for nothing, the run ends.
        models: other models by name: the address of their server (`http://.../v1`), "start" for the weights that
            training began with, or None for a name without a model. Any other name is the policy. Replies of other
            models are not trained.
        model_keys: of these, variables of the environment that hold the keys of their servers.
        model_deadline: seconds for an answer of such a server.
        sandbox: a command runs in the sandbox of `verl.sandbox`, with no network but the gateway.
        readable: files and folders that it may read there besides its program and the files that it names.
        sampling: "agent": where rows are greedy, as in evaluation, requests say how they are sampled.

    Raises:
        ConfigError: this is no agent, no address or no key, or nothing that runs in a sandbox.
    """

    #: A trainer needs no reward beside it.
    gives_reward = True

    @checked
    def __init__(
        self,
        agent: Any,
        *,
        chat_template: str | None = None,
        deadline: Seconds = 600.0,
        max_calls: Count = 512,
        max_tokens: Count = 65_536,
        on_agent_error: float | None = None,
        train: Callable[[Call], bool] | None = None,
        environment: Mapping[str, str] | None = None,
        models: Mapping[str, str | None] | None = None,
        model_keys: Mapping[str, str] | None = None,
        model_deadline: Seconds = 600.0,
        sandbox: bool = False,
        readable: Sequence[str | Path] = (),
        sampling: Literal["run", "agent"] = "run",
        max_left_out: Portion = 0.5,
    ) -> None:
        #: None: the agent runs in no sandbox.
        self.readable = [os.path.abspath(path) for path in readable] if sandbox else None
        self.agent = agents.agent_of(agent, environment or {}, self.readable, deadline)
        #: Those that a command names; a run notes whether they change.
        self.files: Sequence[str] = getattr(self.agent, "files", ())
        self.chat_template, self.on_agent_error, self.train = chat_template, on_agent_error, train
        self.models, self.model_keys, self.model_deadline = dict(models or {}), dict(model_keys or {}), model_deadline
        _check_models(self.models, self.model_keys)
        self.max_calls, self.max_tokens, self.agent_samples = max_calls, max_tokens, sampling == "agent"
        #: Whether the weights that training began with must be there.
        self.asks_start = START in self.models.values()
        self.seconds, self.max_left_out = deadline, max_left_out
        #: Of a function the time begins when it is called.
        self._bound = None if callable(agent) else deadline
        #: Of the episode: two runs, and a moment to end each.
        self.deadline = 2 * deadline + 10.0

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if the chat template does not show what an agent needs."""
        if self.readable is None:
            logger.warning("nothing contains what the agent executes: it runs as you, with your files and your network")
        else:
            require()
            logger.info("the agent runs in the sandbox: no network but the gateway, and of your files only %s",
                        ", ".join(self.readable) or "its own")  # fmt: skip
        for what in ChatTemplate(tokenizer, self.chat_template).check():
            logger.warning("the chat template drops %s: each call behind one is a conversation of its own", what)

    async def __call__(self, client: Client, row: Row) -> list[Turns]:
        record = await self.run(client, row)
        # The last one has the last call, and so what the episode came to: it is the one that rewards read.
        turns: list[Turns] = [*sorted(record.trajectories, key=lambda trajectory: trajectory.calls[-1].id)]
        turns = turns or [Turns(policy_version=record.calls[-1].sample.policy_version)]  # nothing of it is trained
        turns[-1].reward, turns[-1].truncated = record.result.reward, record.truncated
        turns[-1].calls_left_out, turns[-1].other_calls = record.excluded, record.others
        return turns

    async def run(self, client: Client, row: Row) -> EpisodeRecord:
        """The whole episode.

        Raises:
            FailedEpisodeError: the agent raised, made no call, or twice did not come to its end.
            EndOfRunError: a model is the weights that training began with, and they are not here.
        """
        assert client.text is not None
        if self.asks_start and client.start is None:
            raise EndOfRunError(
                "models: 'start' is for synchronous training in one process: what generates here has no starting "
                "weights; start a server of them, and give its address"
            )
        template = template_of(client.text.tokenizer, self.chat_template, client.text.ends)
        inputs = {key: value for key, value in template_inputs(row).items() if key != "tools"}
        fault = reason = ""
        async with listening() as listener:
            for _ in range(2):
                session = Session(client, template, inputs, self)
                try:
                    result = await self._attempt(listener, session, row)
                    if (failure := session.failure) is None:
                        return self._record(session, result)
                    fault, reason = str(failure), "fault"
                except KilledError as error:
                    fault, reason = str(error), "killed"
                except LateError as error:
                    fault, reason = f"the agent {error}", "late"
        raise FailedEpisodeError(f"twice: {fault}", reason)

    async def _attempt(self, listener: Listener, session: Session, row: Row) -> AgentResult:
        """Raises KilledError, LateError or FailedEpisodeError."""
        try:
            with listener.admitting(session):
                work = self.agent(f"http://127.0.0.1:{listener.port}/v1", session.key, row)
                return agents.result_of(await within(work, self._bound))
        except VerlError:
            raise
        except (AgentError, RuntimeError) as error:  # the second: it exits or cancels itself, see `within`
            if session.failure is not None:  # which the agent only passes on
                return AgentResult()
            if self.on_agent_error is None:
                text = str(error).replace(session.key, "(its key)")
                raise FailedEpisodeError(f"the agent raised: {text}", "raised") from None
            return AgentResult(self.on_agent_error)

    def _record(self, session: Session, result: AgentResult) -> EpisodeRecord:
        if not session.calls:
            raise FailedEpisodeError("the agent made no call that was answered", "no_call")
        ids, names = {call.id for call in session.calls}, {call.name for call in session.calls}
        # The id of a call, from the id of its response in a dialect.
        rated = {name: name.rpartition("_")[2].rpartition("-")[2] for name in result.calls}
        unknown = [name for name in result.trajectories if name not in names]
        unknown += [name for name, id in rated.items() if id not in ids]
        if unknown:
            raise FailedEpisodeError(
                f"the agent gave '{unknown[0]}' a reward, and no call has that name or id", "raised"
            )
        if (train := self.train) is not None:
            for call in session.calls:
                if call.excluded in ("", "excluded"):
                    call.excluded = "" if train(call) else "excluded"
        reasons = Counter(call.excluded for call in session.calls if call.excluded) + session.lost
        kept = trajectories(session.calls, {rated[name]: reward for name, reward in result.calls.items()})
        for trajectory in kept:
            trajectory.own_reward = result.trajectories.get(trajectory.name)
        return EpisodeRecord(kept, result, session.calls, reasons, session.truncated, +session.others)


def _check_models(models: Mapping[str, str | None], keys: Mapping[str, str]) -> None:
    """Raises ConfigError for an invalid address, a missing key, and a key that would be sent in the clear."""
    for name, url in models.items():
        if url is not None and url != START and not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"models: '{name}' is 'start' or the address of a server that speaks as OpenAI's, not {masked(url)!r}"
            )
    for name, variable in keys.items():
        url = models.get(name)
        if url is None or url == START:
            raise ConfigError(f"model_keys: '{name}' is no server of models: {nearest(name, models)}")
        if not os.environ.get(variable):
            raise ConfigError(f"model_keys: '{name}' has its key in the variable {variable}, which is not set")
        key_of(os.environ[variable], f"model_keys: '{name}'")
        if url.startswith("http://") and not agents.is_loopback(url):
            raise ConfigError(
                f"models: '{name}' has a key, which http would show on its way to {masked(url)}: use https"
            )
