"""AdamW on bf16 weights. Its state, an int16 remainder and fp32 moments, takes 10 bytes a weight; with bf16 moments 6.

The fp32 master is not stored. The live weight is the master rounded to the nearest bf16 (ties away from zero), and the
difference of the two bit patterns fits into the 16-bit remainder. So steps are computed on the exact fp32 master.

bf16 moments (as in the training of DeepSeek-V3, arXiv 2412.19437, section 3.3.1) are rounded stochastically, unlike
there: the second moment moves by a thousandth per step, less than half a unit in the last place of bf16, so rounding to
nearest would freeze it. The random bits are a hash of the weight's name, the step and the element's index: runs repeat,
and ranks that hold the same weight round it alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from verl._host.device import is_accelerator, total_memory
from verl.kernels.compiled import VECTOR, kernels
from verl.kernels.inductor import lacking
from verl.training.gradients import Weight, zeros_like
from verl.training.options import OptimConfig
from verl.weights.forks import no_forks
from verl.weights.shard import Shard, blocks_of
from verl.weights.shards import LocalShard, overlap

logger = logging.getLogger(__name__)

# Elements that the torch code works on at a time on CPU: its fp32 copies stay small.
_BLOCK = 1 << 20
# Bytes of temporaries that it makes of an element, at most.
_TEMPORARIES = 40
# Elements that the fused kernel is given at a time: their index is an int32.
_LARGEST = 1 << 30


@dataclass(eq=False)
class _State:
    remainder: Tensor
    """int16, in the shape of the weight: bits of the master less those of the live weight."""
    first: Tensor
    second: Tensor
    steps: int = field(default=0, kw_only=True)


def decay_of(weight: Weight, config: OptimConfig) -> float:
    """The weight decay of a weight."""
    return 0.0 if config.weight_decay_on == "matrices" and weight.source.ndim < 2 else config.weight_decay


class SplitAdamW:
    """AdamW over bf16 `weights`; moments in `config.moments` (bf16 if that is None).

    A weight's bias correction counts the steps in which it had a gradient, as torch does.
    """

    def __init__(self, weights: list[Weight], config: OptimConfig) -> None:
        self.weights = weights
        self._config = config
        dtype = torch.float32 if config.moments == "float32" else torch.bfloat16
        lives = [weight.live.detach() for weight in weights]
        parts = (zeros_like(lives, kind) for kind in (torch.int16, dtype, dtype))
        states = (_State(*tensors) for tensors in zip(*parts, strict=True))
        self._states = dict(zip(weights, states, strict=True))
        no_forks(self, lambda rule: (t for s in rule._states.values() for t in (s.remainder, s.first, s.second)))

    @torch.no_grad()
    def step(self, lr: float, gradient_scale: float) -> None:
        """One step with the gradient sums, multiplied by `gradient_scale`."""
        for weight, state in self._states.items():
            if not weight.has_gradient or weight.gradient is None:
                continue
            state.steps += 1
            name = torch.tensor(_signed(crc32(weight.drawn_as.encode())), dtype=torch.int32)
            seed = int(_mixed(_mixed(name) ^ state.steps))
            formula = _Formula.of(self._config, lr, gradient_scale, state.steps, seed, decay_of(weight, self._config))
            _step(weight.live, weight.gradient, state, formula)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, name, tensor) of all there is to save: masters are put together for it."""
        for weight, state in self._states.items():
            yield weight.name, "master", _master(weight.live.detach(), state.remainder)
            if state.steps:
                yield weight.name, "exp_avg", state.first
                yield weight.name, "exp_avg_sq", state.second
                yield weight.name, "step", torch.tensor(float(state.steps))

    def begin_load(self) -> None:
        """Forget the moments: those that come are filled in."""
        for state in self._states.values():
            state.steps = 0
            state.first.zero_()
            state.second.zero_()

    def fill(self, weight: Weight, name: str, shard: Shard) -> int:
        """Copy the elements of a shard that belong to this rank; returns how many. A master is split at once."""
        state, like = self._states[weight], weight.source.detach()
        if name != "master":
            return LocalShard(like, {"exp_avg": state.first, "exp_avg_sq": state.second}[name]).fill(shard)
        count, remainders = 0, blocks_of(like, state.remainder)
        for (offset, live), (_, remainder) in zip(blocks_of(like, weight.live.detach()), remainders, strict=True):
            live, master = overlap(offset, live, shard)
            _split(master, live, overlap(offset, remainder, shard)[0])
            count += master.numel()
        return count

    def put(self, weight: Weight, name: str, value: Tensor) -> None:
        """Take over a state that is one value for the whole weight."""
        if name == "step":
            self._states[weight].steps = int(value)

    def refresh(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
        for state in self._states.values():
            state.remainder.zero_()

    def move(self, to_host: bool) -> None:
        """Everything but the live weights to host memory, or back to where these are."""
        for weight, state in self._states.items():
            device = torch.device("cpu") if to_host else weight.live.device
            state.remainder, state.first, state.second = (
                t.to(device) for t in (state.remainder, state.first, state.second)
            )


@dataclass(frozen=True)
class _Formula:
    """The numbers of a step; `seed` as an int32."""

    seed: int
    gradient_scale: float
    beta1: float
    beta2: float
    step_size: float
    second_scale: float
    eps: float
    decay: float

    @classmethod
    def of(
        cls, config: OptimConfig, lr: float, gradient_scale: float, steps: int, seed: int, weight_decay: float
    ) -> _Formula:
        beta1, beta2 = config.betas
        step_size, second_scale = lr / (1 - beta1**steps), 1 / math.sqrt(1 - beta2**steps)
        decay = 1 - lr * weight_decay
        return cls(seed, gradient_scale, beta1, beta2, step_size, second_scale, config.adam_eps, decay)

    def numbers(self) -> Tensor:
        """int32 `[10]`, as `_update` takes it: the bits of nine fp32 numbers, and the seed. Differences are taken in
        fp64, before they are rounded."""
        rates = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        floats = (self.gradient_scale, *rates, self.step_size, self.second_scale, self.eps, self.decay)
        bits = torch.tensor(floats, dtype=torch.float32).view(torch.int32)
        return torch.cat([bits, torch.tensor([self.seed], dtype=torch.int32)])


def _step(live: Tensor, gradient: Tensor, state: _State, formula: _Formula) -> None:
    tensors = (live, state.remainder, state.first, state.second, gradient)
    suits = live.numel() % VECTOR == 0 and all(t.is_contiguous() for t in tensors)
    compiled = kernels(live.dtype, live.device) if suits else None
    if compiled is None:
        _step_in_torch(live, gradient, state, formula)
    else:
        is_bf16 = state.first.dtype == torch.bfloat16
        compiled.adamw(*tensors, live.numel(), *vars(formula).values(), is_bf16)


def _step_in_torch(live: Tensor, gradient: Tensor, state: _State, formula: _Formula) -> None:
    # A view where the memory allows it; otherwise the results are copied back.
    flat = [t.reshape(-1) for t in (live.detach(), state.remainder, state.first, state.second, gradient)]
    update, block = _code(live.device)
    numbers = formula.numbers().to(live.device, non_blocking=True)
    for start in range(0, live.numel(), block):
        update(*(t[start : start + block] for t in flat), numbers, _index_of(start, live.device))
    for tensor, values in zip((live.detach(), state.remainder, state.first, state.second), flat, strict=False):
        if tensor.data_ptr() != values.data_ptr():
            tensor.copy_(values.view(tensor.shape))


def _index_of(start: int, device: torch.device) -> Tensor:
    """int32 of no dimension: an element's number, of which the lowest 32 bits count."""
    return torch.full((), _signed(start), dtype=torch.int32, device=device)


def _code(device: torch.device) -> tuple[Callable[..., None], int]:
    """The function that updates a part of a weight, and its most elements: on an accelerator one kernel for all."""
    if not is_accelerator(str(device)):
        return _update, _BLOCK
    if (lack := lacking(device.type)) is None:
        return _fused(), _LARGEST
    _say_once(device.type, lack)
    return _update, min(_LARGEST, total_memory(device) // (100 * _TEMPORARIES))


@cache
def _say_once(kind: str, lack: str) -> None:
    logger.warning(
        "AdamW runs on '%s' by single torch operations, which is slower than one fused kernel: %s", kind, lack
    )


@cache
def _fused() -> Callable[..., None]:
    """`_update` as one kernel for weights of any size."""
    return torch.compile(_update, dynamic=True, fullgraph=True)


def _update(
    live: Tensor, remainder: Tensor, first: Tensor, second: Tensor, gradient: Tensor, numbers: Tensor, start: Tensor
) -> None:
    """One step of `[N]` elements from number `start`, in place. All that changes from step to step comes in tensors:
    torch would compile a Python number into the kernel."""
    scale, beta1, rest1, beta2, rest2, step_size, second_scale, eps, decay = numbers[:9].view(torch.float32).unbind()
    g = gradient * scale
    m = first.float() * beta1 + g * rest1
    v = second.float() * beta2 + g * g * rest2
    master = _master(live, remainder) * decay
    master -= step_size * m / (v.sqrt() * second_scale + eps)
    index = torch.arange(live.numel(), dtype=torch.int32, device=live.device)
    noise = _mixed((index + start) ^ numbers[9])
    _store_moment(first, m, noise & 0xFFFF)
    _store_moment(second, v, (noise >> 16) & 0xFFFF)
    _split(master, live, remainder)


def _master(live: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a live bf16 tensor and its remainder."""
    bits = live.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += remainder
    return bits.view(torch.float32)


def _split(master: Tensor, live: Tensor, remainder: Tensor) -> None:
    """The inverse of `_master`, into `live` and `remainder`, in the memory of one more master."""
    bits = master.to(live.device).view(torch.int32)
    nearest = bits + 0x8000
    nearest >>= 16
    nearest <<= 16
    live.copy_(nearest.view(torch.float32))
    remainder.copy_(torch.sub(bits, nearest, out=nearest))


def _store_moment(moment: Tensor, value: Tensor, noise: Tensor) -> None:
    if moment.dtype == torch.float32:
        moment.copy_(value)
    else:
        bits = value.view(torch.int32) + noise
        moment.copy_((bits & -0x10000).view(torch.float32))


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser in int32. Products wrap around, so the bits are the same as unsigned; the masks remove
    the sign bits that right shifts repeat."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(x: int) -> int:
    """The int32 with the lowest 32 bits of a number."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)
