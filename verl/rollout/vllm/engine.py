"""vLLM in this process, as a `RolloutEngine`.

The engine has its own copy of the weights. It is made from the model's configuration, receives each policy version, the
first included, through vLLM's weight-transfer interface (`worker`), and then reports the version that it serves.
A sample's tokens are determined by (run seed, sample id) up to rounding; vLLM samples with its own generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from verl._base.combinations import check
from verl.data.text import ResponseText
from verl.errors import RolloutError
from verl.rollout.base import Request, Sample, check_new
from verl.rollout.stop_strings import cut_text
from verl.rollout.vllm import start
from verl.rollout.vllm.requests import FINISH, check_request, prompt_scores, sampled, sampling_arguments
from verl.rollout.vllm.transport import Transport, in_file, in_process, transport_for
from verl.weights.shard import Shard, in_buckets, split_large
from verl.weights.shards import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        device: where the model is, or will be; None: where it is now. Free memory is measured on the
            device on which this build of vLLM computes: this one, if vLLM supports its kind.
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
        check({"vllm": "vllm", (dtype := str(model.dtype).removeprefix("torch.")): dtype})
        trainer, kind = str(device or model.device), str(start.platform().device_type)
        # The build of vLLM decides on which kind of device it computes, which may be another than the model's.
        where = trainer if trainer.partition(":")[0] == kind else kind
        kv_memory, self.max_length = start.kv_cache(model, where, kv_memory, max_num_seqs, max_length)
        self.eos_token_ids, self.seed = tuple(eos_token_ids), seed
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
        self._publish: Transport = in_process
        if tensor_parallel_size > 1 or torch.distributed.is_initialized():  # vLLM has processes of its own then
            self._publish = transport_for(trainer, where, tensor_parallel_size)
        options |= {"max_num_seqs": max_num_seqs, "max_model_len": self.max_length, "seed": seed & 0x7FFFFFFF}
        self.llm = start.start(
            model, tokenizer, where, tensor_parallel_size, kv_cache_memory_bytes=kv_memory, **options
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
        self._check()
        check_new(request, {*self._running, *(sample.id for sample in (*self._ready, *self._scoring.values()))})
        check_request(request, self._scaled, self._vocab_size, self.max_length)
        if request.params.temperature not in (0, 1) and request.grammar is not None:
            raise RolloutError(f"request '{request.id}' has a grammar: vLLM then has log-probs at temperature 1 only")
        prompt = list(request.prompt_tokens)
        room = self.max_length - len(prompt)
        if min(request.params.max_new_tokens, room) == 0:
            self._ready.append(Sample(request.id, [], [], "length", self.policy_version))
            return
        params = sampling_arguments(request, self.seed, self.eos_token_ids, room)
        self._submit(request.id, prompt, params | {"flat_logprobs": True})
        self._running[request.id] = request, self.policy_version

    def step(self) -> list[Sample]:
        """One step of vLLM's engine; the samples that finished.

        Raises:
            NoWeightsError: the weights were dropped in sleep.
            RolloutError: vLLM failed; it is not used again.
        """
        self._check()
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
            completion = output.outputs[0]
            tokens, finish = list(completion.token_ids), FINISH.get(completion.finish_reason, "abort")
            if request.grammar is not None and isinstance(completion.stop_reason, str):
                finish = "length"  # a stop string came before the grammar's end
            text = cut_text(self._decode, tokens, request.params) if request.params.stop else None
            sample = Sample(request.id, tokens, sampled(completion.logprobs), finish, version, text)
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
        self._check(has_weights=False)
        bunches = in_buckets(split_large(shards), on_host=self._publish is in_file)
        coming = [next(bunches, [])]  # of a stream that fails at once, nothing is applied
        self._wake("weights")
        before, dropped = self._served(), self.lacks_weights
        try:
            self.llm.start_weight_update()
            while coming:
                with self._publish(coming.pop()) as weights:
                    update = {"version": version, "tied": self._tied, "weights": weights}
                    self.llm.update_weights({"update_info": update})
                del update, weights  # before the next are made
                coming += islice(bunches, 1)
        except BaseException as error:  # vLLM's own, of any kind, or the stream's
            # A part of it may have been applied over weights that were served.
            if not dropped and (self._served() != before or None in before):
                self._broken = f"it has a part of the weights of version {version}: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            raise RolloutError(f"vLLM did not take the weights of version {version}: {error}") from error
        self._call(self.llm.finish_weight_update, str(version))
        self._wake("kv_cache")
        self._call(self.llm.reset_prefix_cache, reset_running_requests=True)
        if (served := self._served()) != {version}:
            self._broken = f"it serves weights of versions {served}, not {version}"
            self._check()
        self.policy_version, self.lacks_weights = version, False

    def score(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> list[float]:
        """Log-probs of a response under the served weights, at temperature 1. No request may be unfinished.

        Raises:
            NoWeightsError: the weights were dropped in sleep.
            RolloutError: a request is unfinished, or vLLM failed.
        """
        self._check()
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

    def _served(self) -> set[int | None]:
        return {answer["version"] for answer in self._call(self.llm.collective_rpc, "verl_served")}

    def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # vLLM's own, of any kind
            self._broken = f"{type(error).__name__}: {error}"
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}") from error

    def _check(self, has_weights: bool = True) -> None:
        if self._broken is not None:
            raise RolloutError(f"vLLM failed and is not used again: {self._broken}")
        if has_weights and self.lacks_weights:
            raise NoWeightsError("vLLM dropped its weights in its sleep: give it some (load_shards) first")
