"""Handles for generation by engines that run elsewhere: servers by address, and a caller's own engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl._base.checked import checked
from verl._base.record import Retries, Seconds, Seed
from verl._host.http_servers import ServerPool
from verl.batch import Batch
from verl.data.chat import ChatTokenizer
from verl.data.text import ResponseText
from verl.data.tokenize import to_prompts
from verl.errors import ConfigError, ModelError
from verl.models.loading import load_tokenizer
from verl.rewards.remote import JudgeReward
from verl.rewards.source import RewardResult, run_reward
from verl.roles.columns import expand
from verl.rollout.base import Request, RolloutEngine, SamplingParams, generate
from verl.rollout.remote import AsyncVLLMEngine, ServerEngine
from verl.rollout.turns import Turns, response_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from verl.models.packed import PackedModel
    from verl.rollout.options import SamplerOptions


class RolloutWorker:
    """Generation by an engine that runs elsewhere, with its own weights; in an actor (`Actor(model, rollout=worker)`),
    with the actor's.

    Args:
        tokenizer: the served model's, as an object, a name or a directory.
        sampling: how responses are drawn; keywords of `generate_sequences` override it.
        seed: with a sample's id it fixes the sample's randomness.
    """

    def __init__(self, tokenizer: Any, sampling: SamplingParams | None, seed: int) -> None:
        self._tokenizer = tokenizer
        self.sampling = sampling or SamplingParams()
        self.seed = seed
        self._calls = 0

    def engine(self, model: PreTrainedModel | None, eos_token_ids: Sequence[int], seed: int) -> RolloutEngine:
        """The engine, for an actor's model; None: for the weights that it has."""
        raise NotImplementedError

    def __call__(
        self, packed: PackedModel, tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...], options: SamplerOptions
    ) -> RolloutEngine:
        """The engine of an actor; see `EngineFactory`."""
        return self.engine(packed.model, eos, options.seed)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The served model's tokenizer.

        Raises:
            ConfigError: none was given.
        """
        if self._tokenizer is None:
            raise ConfigError(f"{type(self).__name__} needs the served model's tokenizer: pass tokenizer=...")
        return load_tokenizer(self._tokenizer) if isinstance(self._tokenizer, str) else self._tokenizer

    @cached_property
    def _own(self) -> tuple[RolloutEngine, ResponseText]:
        """The engine with its own weights, and what decodes its responses."""
        ends = ChatTokenizer(self.tokenizer).ends
        return self.engine(None, ends, self.seed), ResponseText(self.tokenizer, ends)

    def generate_sequences(self, prompts: Any, *, n: int = 1, key: str | None = None, **sampling: Any) -> Batch:
        """See `Actor.generate_sequences`. A failed request has `finish` "abort" and no tokens."""
        batch = to_prompts(self.tokenizer, prompts)
        if "group" not in batch:
            batch = batch.add({"group": [f"{key or f'c{self._calls}'}.{row}" for row in range(len(batch))]})
            self._calls += 1
        rows, params = expand(batch, n), replace(self.sampling, **sampling)
        pairs = zip(rows["id"], rows["prompt_tokens"], strict=True)
        requests = [Request(name, tokens, params) for name, tokens in pairs]
        engine, text_of = self._own
        by_id = {sample.id: sample for sample in generate(engine, requests)}
        columns = response_columns([Turns().wrote(by_id[name]) for name in rows["id"]])
        return rows.add({**columns, "response": list(map(text_of, columns["response_tokens"]))})


class vLLMWorker(RolloutWorker):  # noqa: N801  (the name that users know)
    """Running vLLM servers, or others with their protocols, by address: for generation, and as a judge.

    As a reward (`Reward(worker)`, or `get_reward`), a score is parsed from the reply to a template, see `JudgeReward`.

    Args:
        api_url: "http://host:8000", with or without "/v1" or "/generate"; or a list, in which each prompt has a server.
        tokenizer: the served model's; not needed for a judge or in an actor.
        model: the name that the servers know the model by; None: the first that they list.
        timeout: seconds for one answer; a request with its retries takes at most twice that.
        retries: further tries of a request that failed, on another server if there is one.
        api_key: sent as a bearer token; "$NAME" is in that variable of the environment.
        sampling, seed: see `RolloutWorker`.
        **judge: options of `JudgeReward`: `template`, `parse`, `system`, `max_tokens`, ...
    """

    whole_batch = False

    @checked
    def __init__(
        self,
        api_url: str | Sequence[str],
        tokenizer: Any = None,
        *,
        model: str | None = None,
        timeout: Seconds = 600.0,
        retries: Retries = 3,
        api_key: str | None = None,
        sampling: SamplingParams | None = None,
        seed: Seed = 0,
        **judge: Any,
    ) -> None:
        super().__init__(tokenizer, sampling, seed)
        self.model = model
        self._servers = {"timeout": timeout, "retries": retries, "api_key": api_key}
        self._urls = api_url
        self._judge = JudgeReward(
            api_url, model=model, timeout=timeout, retries=retries, api_key=api_key, **judge
        )  # connects at the first request
        self.name = self._judge.name

    def engine(self, model: PreTrainedModel | None, eos_token_ids: Sequence[int], seed: int) -> ServerEngine:
        pool = ServerPool(self._urls, **self._servers, kind="rollout server")  # type: ignore[arg-type]
        return ServerEngine(pool, model, eos_token_ids=eos_token_ids, seed=seed, served_model=self.model)

    async def score(self, batch: Batch) -> RewardResult:
        """The judge's scores: a worker is a `RewardSource`, too."""
        return await self._judge.score(batch)

    def get_reward(self, sequences: Batch) -> Batch:
        """Columns `reward`, `abstain_reason`: the judge's scores, waited for."""
        return run_reward(self._judge, sequences).as_batch()


class vLLMAdapter(RolloutWorker):  # noqa: N801
    """A caller's asynchronous vLLM engine (`AsyncLLM`), with the caller's tokenizer.

    Args:
        engine: has `generate(prompt, sampling_params, request_id)`, an asynchronous iterator.
        tokenizer: the caller's; None: the engine's own.
        loop: the event loop that the engine runs in; None: the one that it has been used in, or else one of our own.
        sampling, seed: see `RolloutWorker`.

    Raises:
        ModelError: the engine cannot generate, or not asynchronously.
    """

    @checked
    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        *,
        loop: Any = None,
        sampling: SamplingParams | None = None,
        seed: Seed = 0,
    ) -> None:
        function = getattr(engine, "generate", None)
        if function is None:
            raise ModelError(f"a {type(engine).__name__} is no engine: it has no generate")
        parameters = inspect.signature(function).parameters.values()
        if not any(p.name == "request_id" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise ModelError(
                f"the generate of a {type(engine).__name__} is not vLLM's asynchronous one (it takes no request_id): "
                "give an AsyncLLM, or let Actor(rollout='vllm') make an engine"
            )
        super().__init__(getattr(engine, "tokenizer", None) if tokenizer is None else tokenizer, sampling, seed)
        self._engine, self._loop = engine, loop

    async def generate_async(self, prompts: Any, **options: Any) -> Batch:
        """`generate_sequences` for asynchronous code, also on the engine's own event loop."""
        return await asyncio.to_thread(self.generate_sequences, prompts, **options)

    def engine(self, model: PreTrainedModel | None, eos_token_ids: Sequence[int], seed: int) -> AsyncVLLMEngine:
        return AsyncVLLMEngine(self._engine, model, eos_token_ids=eos_token_ids, seed=seed, loop=self._loop)
