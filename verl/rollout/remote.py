"""Engines outside this thread: servers by address, and a caller's asynchronous vLLM.

Each request is a coroutine on an event loop in another thread; `step` waits for some to finish.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from verl._host.http_servers import NoServerError, Server, ServerPool, check_model_path
from verl._host.user_calls import DEADLINE
from verl.errors import RolloutError
from verl.rollout.base import Request, Sample, check_new
from verl.rollout.vllm.requests import FINISH, check_request, prompt_scores, sampled, sampling_arguments
from verl.rollout.vllm.transport import in_file
from verl.weights.shard import Shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
_UNLIMITED = 1 << 30
_COMPLETIONS = "/v1/completions"
#: Failed requests in a row that end the run.
_MAX_FAILED = 64
#: How a vLLM server is started that takes weights.
SERVER_OPTIONS = (
    "VLLM_SERVER_DEV_MODE=1 ... --worker-extension-cls verl.rollout.vllm.worker.WorkerExtension "
    """--weight-transfer-config '{"backend": "verl"}'"""
)


class RemoteEngine:
    """The common part of engines whose requests run on another thread's event loop. See `RolloutEngine`.

    A request that fails is returned with `finish="abort"` and no tokens, and its error is logged.

    Args:
        model: for its vocabulary, longest length and tied weights; None: requests are not checked here, and weights
            cannot be given.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.

    Attributes:
        deadline: seconds for an update of the weights, and for the scores of a response.
    """

    deadline = DEADLINE
    # What an engine of this kind has: its event loop, and three requests to it.
    _submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    _sample: Callable[[Request, dict[str, Any]], Coroutine[Any, Any, Sample]]
    _update: Callable[[dict[str, Any], list[Shard]], Coroutine[Any, Any, None]]
    _score: Callable[[list[int], list[int]], Coroutine[Any, Any, list[float]]]

    def __init__(self, model: PreTrainedModel | None, *, eos_token_ids: Sequence[int], seed: int) -> None:
        from verl.weights.shards import tied_names

        config = model.config.get_text_config() if model is not None else None
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        self.policy_version = 0
        self._tied = tied_names(model) if model is not None else {}
        self._vocab_size = int(getattr(config, "vocab_size", _UNLIMITED))
        self._max_length = int(getattr(config, "max_position_embeddings", None) or _UNLIMITED)
        self._asked: dict[str, Future[Sample]] = {}
        #: Whether log-probs are of temperature-scaled logits, as far as the workers have said.
        self._scaled = True
        #: Why the engine must not be used any more.
        self._broken: str | None = None
        self._failed = 0
        self._done: queue.SimpleQueue[tuple[str, Future[Sample]]] = queue.SimpleQueue()

    @property
    def unfinished(self) -> int:
        return len(self._asked)

    def add(self, request: Request) -> None:
        """Send a request.

        Raises:
            RolloutError: it is invalid, its id is in use, or it has parts that cannot be sent.
        """
        check_new(request, self._asked)
        if self._broken is not None:
            raise RolloutError(f"the engine is not used again: {self._broken}")
        if request.grammar is not None:
            why = "its log-probs would be the masked model's, not the trainer's; use the engine embedded, hf or vllm"
            raise RolloutError(f"request '{request.id}' has a grammar: {why} (in process)")
        check_request(request, self._scaled, self._vocab_size, self._max_length)
        future = self._submit(self._answer(request))
        self._asked[request.id] = future
        future.add_done_callback(lambda done: self._done.put((request.id, done)))

    def step(self) -> list[Sample]:
        """Wait a moment for samples, and return those that finished.

        Raises:
            RolloutError: no server works any more, or many requests in a row failed. All requests are aborted then.
        """
        done = []
        with suppress(queue.Empty):
            done.append(self._done.get(timeout=0.5 if self._asked else 0.001))
            while True:
                done.append(self._done.get_nowait())
        try:
            return [self._result(name) for name, future in done if self._asked.get(name) is future]
        except BaseException:
            self.abort(list(self._asked))
            self._asked.clear()
            raise

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step`s return them, without tokens."""
        for name in ids:
            if name in self._asked:
                self._asked[name].cancel()

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Give the engine new weights, in a file that it must be able to read.

        Raises:
            RolloutError: it does not take them, or serves others afterwards.
        """
        weights = list(shards)
        with in_file(weights) as file:
            update = {"version": version, "tied": self._tied, "weights": file}
            self._wait(self._update(update, weights), "take the weights")
        self.policy_version = version

    def score(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> list[float]:
        """Log-probs of a response under the weights that are served, at temperature 1."""
        work = self._score(list(prompt_tokens), list(response_tokens))
        return self._wait(work, "score a response")  # type: ignore[no-any-return]

    def sleep(self) -> None:
        """Nothing to do: the memory is not ours."""

    def wake(self) -> None:
        """Nothing to do."""

    def _wait(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        """Raises RolloutError if work on the engine's loop takes longer than `deadline`."""
        future = self._submit(work)
        wait([future], timeout=self.deadline)
        if not future.done():
            future.cancel()
            raise RolloutError(f"the rollout engine did not {what} within {self.deadline:g} s")
        return future.result()

    async def _answer(self, request: Request) -> Sample:
        version, room = self.policy_version, self._max_length - len(request.prompt_tokens)
        arguments = sampling_arguments(request, self.seed, self.eos_token_ids, room)
        if arguments["max_tokens"] == 0:
            return Sample(request.id, [], [], "length", version)
        sample = await self._sample(request, arguments)
        sample.policy_version = version
        return sample

    def _result(self, name: str) -> Sample:
        future = self._asked.pop(name)
        if future.cancelled():
            return Sample(name, [], [], "abort", self.policy_version)
        error = future.exception()
        if error is None:
            self._failed = 0
            return future.result()
        if isinstance(error, NoServerError) or not isinstance(error, RolloutError):
            raise error
        logger.warning("sample '%s' failed: %s", name, error)
        self._failed += 1
        if self._failed >= _MAX_FAILED:
            self._failed = 0
            raise RolloutError(f"{_MAX_FAILED} requests in a row failed; the latest, '{name}': {error}") from error
        return Sample(name, [], [], "abort", self.policy_version)


class ServerEngine(RemoteEngine):
    """Running vLLM servers (or others with their protocols) as one engine.

    Requests are OpenAI's completions with vLLM's additions for token ids. Every server gets the weights; one that does
    not take them is not used until it does, and one that was restarted is given them again.

    Args:
        pool: the servers.
        model, options: see `RemoteEngine`.
        served_model: the name that they serve the model under; None: the first that they list.
    """

    def __init__(
        self, pool: ServerPool, model: PreTrainedModel | None = None, *, served_model: str | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        check_model_path(pool.path)
        self.pool, self._served_model, self._submit = pool, served_model, pool.submit
        #: Version and shards of the latest weights; live tensors of the trainer's where it gave those.
        self._latest: tuple[int, list[Shard]] | None = None

    def wake(self) -> None:
        """Give the weights to servers that were restarted since the last rollout."""
        if self._latest is not None:
            self._wait(self._check_all(), "take the weights again")

    async def _check_all(self) -> None:
        for server in self.pool.servers:
            server.checked = False
        results = await asyncio.gather(*map(self._prepare, self.pool.servers), return_exceptions=True)
        for server, result in zip(self.pool.servers, results, strict=True):
            if isinstance(result, BaseException):
                server.note_failure()
                logger.warning("rollout server %s is not used for now: %s", server.url, result)

    async def _sample(self, request: Request, arguments: dict[str, Any]) -> Sample:
        prompt = list(request.prompt_tokens)
        del arguments["detokenize"]
        read = partial(_read, request, self._vocab_size)
        return await self._ask(read, tuple(prompt), prompt=prompt, **arguments, return_token_ids=True)

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        tokens = prompt + response

        def read(answer: Any) -> list[float]:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, tokens, strict=True) if entry]

        scores = await self._ask(read, None, prompt=tokens, max_tokens=1, prompt_logprobs=0)
        return scores[len(tokens) - 1 - len(response) :]

    async def _ask(self, read: Callable[[Any], T], key: Any, **body: Any) -> T:
        body["model"] = self._served_model or await self.pool.model()
        return await self.pool.ask({_COMPLETIONS: body}, read, key=key)

    async def _update(self, update: dict[str, Any], weights: list[Shard]) -> None:
        self._latest, self.pool.prepare = (update["version"], weights), self._prepare

        async def give(server: Server) -> str | None:
            async with server.lock:
                try:
                    await self._give(server, update)
                except Exception as error:  # an answer may be wrong in any way
                    server.note_failure()
                    return f"{server.url} did not take the weights: {type(error).__name__}: {error}"
            return None

        faults = [fault for fault in await asyncio.gather(*map(give, self.pool.servers)) if fault]
        for fault in faults:
            logger.warning("rollout server %s; it is not used until it does", fault)
        if len(faults) == len(self.pool.servers):
            raise NoServerError(
                f"no rollout server took the weights of version {update['version']}: {'; '.join(faults)}. A vLLM "
                f"server takes weights when it is started with {SERVER_OPTIONS}"
            )

    async def _prepare(self, server: Server) -> None:
        """Give a server the latest weights if it does not serve them.

        Raises:
            RolloutError: it does not take them.
            Exception: as `ServerPool.send`.
        """
        failures = server.failures
        async with server.lock:
            assert self._latest is not None
            version, weights = self._latest
            if server.checked and server.weights == version:
                return
            if server.failures > failures:
                raise RolloutError("it failed to take the weights")
            if server.weights != version or await self._served(server) != {version}:
                logger.warning("rollout server %s gets the weights of version %d again", server.url, version)
                with in_file(weights) as file:
                    await self._give(server, {"version": version, "tied": self._tied, "weights": file})
            server.checked = True

    async def _give(self, server: Server, update: dict[str, Any]) -> None:
        """Raises RolloutError if a server does not serve the weights afterwards; what `ServerPool.send` raises."""
        server.weights, send = None, self.pool.send
        prepared = await send(server, "/collective_rpc", {"method": "verl_prepare"})
        self._scaled &= all(worker.get("scaled", True) for worker in prepared["results"])
        await send(server, "/start_weight_update")
        await send(server, "/update_weights", {"update_info": update})
        await send(server, "/finish_weight_update", {"weight_version": str(update["version"])})
        await send(server, "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if (served := await self._served(server)) != {update["version"]}:
            raise RolloutError(f"it serves the weights of versions {served}, not {update['version']}")
        server.weights, server.checked, server.failures, server.paused_until = update["version"], True, 0, 0.0

    async def _served(self, server: Server) -> set[int | None]:
        answer = await self.pool.send(server, "/collective_rpc", {"method": "verl_served"})
        return {worker["version"] for worker in answer["results"]}


def _read(request: Request, vocab_size: int, answer: Any) -> Sample:
    """A sample from a server's answer. Raises ValueError, LookupError or TypeError if it is malformed."""
    choice = answer["choices"][0]
    tokens = list(choice["token_ids"])
    log_probs = [float(number) for number in choice["logprobs"]["token_logprobs"]]
    if len(log_probs) != len(tokens) or not tokens or len(tokens) > request.params.max_new_tokens:
        raise ValueError(f"{len(tokens)} tokens came with {len(log_probs)} log-probs")
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError("some tokens are not in the model's vocabulary")
    if not all(-1e9 < number <= 1e-3 for number in log_probs):
        raise ValueError("some log-probs are invalid")
    return Sample(request.id, tokens, log_probs, FINISH[choice["finish_reason"]], 0)


class AsyncVLLMEngine(RemoteEngine):
    """A caller's `vllm.AsyncLLM`. It takes weights if it was made with the `worker_extension_cls` and
    `weight_transfer_config` of `verl.rollout.vllm.worker`.

    Args:
        engine: has `generate(prompt, sampling_params, request_id)`, an asynchronous iterator.
        model, options: see `RemoteEngine`.
        loop: the event loop that it runs in; None: the one that it has been used in, or else one of our own.
    """

    def __init__(
        self, engine: Any, model: PreTrainedModel | None, *, loop: asyncio.AbstractEventLoop | None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.engine = engine
        handler = getattr(engine, "output_handler", None)
        self._loop = loop or (handler.get_loop() if handler is not None else asyncio.new_event_loop())
        if loop is None and handler is None:
            threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if asyncio._get_running_loop() is self._loop:
            work.close()
            raise RolloutError("the engine runs on the event loop of this thread: await generate_async(...) instead")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _last(self, name: str, prompt: list[int], arguments: dict[str, Any]) -> Any:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = [o async for o in self.engine.generate(TokensPrompt(prompt_token_ids=prompt), params, name)]
        if not outputs or not outputs[-1].finished:
            raise RolloutError(f"the engine did not finish request '{name}'")
        return outputs[-1]

    async def _sample(self, request: Request, arguments: dict[str, Any]) -> Sample:
        arguments = arguments | {"flat_logprobs": True}
        completion = (await self._last(request.id, list(request.prompt_tokens), arguments)).outputs[0]
        finish = FINISH.get(completion.finish_reason, "abort")
        return Sample(request.id, list(completion.token_ids), sampled(completion.logprobs), finish, 0)

    async def _score(self, prompt: list[int], response: list[int]) -> list[float]:
        output = await self._last("verl-score", prompt + response, {"max_tokens": 1, "prompt_logprobs": 0})
        return prompt_scores(output, response)

    async def _update(self, update: dict[str, Any], weights: list[Shard]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        version = update["version"]
        try:
            self._scaled = all(worker["scaled"] for worker in await self.engine.collective_rpc("verl_prepare"))
            await self.engine.start_weight_update()
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=update))
            self._broken = f"it may have taken a part of the weights of version {version}"
            await self.engine.finish_weight_update(str(version))
            await self.engine.reset_prefix_cache(reset_running_requests=True)
            answers = await self.engine.collective_rpc("verl_served")
        except asyncio.CancelledError:
            self._broken = f"it was cut off while it took the weights of version {version}"
            raise
        except Exception as error:  # vLLM's own, of any kind
            raise RolloutError(f"the engine did not take the weights of version {version}: {error}") from error
        if {answer["version"] for answer in answers} != {version}:
            raise RolloutError(f"the engine serves {answers} after an update to version {version}")
        self._broken = None
