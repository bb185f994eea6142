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
from functools import cache
from itertools import chain
from zlib import crc32

import torch
from torch import Tensor

from verl._host.device import is_accelerator, total_memory
from verl.kernels.compiled import VECTOR, kernels
from verl.kernels.inductor import lacking
from verl.training.gradients import Weight, zeros_like
from verl.training.options import OptimConfig
from verl.weights.shard import Shard, blocks_of
from verl.weights.shards import fill_blocks, no_forks, overlap

logger = logging.getLogger(__name__)

# Elements that the torch code works on at a time on CPU: its fp32 copies stay small.
_BLOCK = 1 << 20
# Bytes of temporaries that it makes of an element, at most.
_TEMPORARIES = 40
# Elements that the fused kernel is given at a time: their index is an int32.
_LARGEST = 1 << 30


def decay_of(weight: Weight, config: OptimConfig) -> float:
    """The weight decay of a weight."""
    return 0.0 if config.weight_decay_on == "matrices" and weight.source.ndim < 2 else config.weight_decay


class SplitAdamW:
    """AdamW over bf16 `weights`; moments in `config.moments` (bf16 if that is None).

    A weight's bias correction counts the steps in which it had a gradient, as torch does.
    """

    def __init__(self, weights: list[Weight], config: OptimConfig) -> None:
        self.weights, self._config = weights, config
        dtype = torch.float32 if config.moments == "float32" else torch.bfloat16
        lives = [weight.live.detach() for weight in weights]
        #: In the shape of the weight. The remainder is int16: bits of the master less those of the live weight.
        kinds = {"remainder": torch.int16, "exp_avg": dtype, "exp_avg_sq": dtype}
        tensors = zip(*(zeros_like(lives, kind) for kind in kinds.values()), strict=True)
        self._states = {weight: dict(zip(kinds, of, strict=True)) for weight, of in zip(weights, tensors, strict=True)}
        self._steps = dict.fromkeys(weights, 0)
        no_forks[self] = lambda rule: chain(*(state.values() for state in rule._states.values()))

    @torch.no_grad()
    def step(self, lr: float, gradient_scale: float) -> None:
        """One step with the gradient sums, multiplied by `gradient_scale`."""
        for weight, state in self._states.items():
            if not weight.has_gradient:
                continue
            self._steps[weight] += 1
            # Copies of a weight on several ranks may have names of their own there: the random bits hang on one name,
            # so that they stay equal.
            drawn_as = getattr(weight.source, "tied_to", weight.name)
            name = torch.tensor(_signed(crc32(drawn_as.encode())), dtype=torch.int32)
            seed = int(_mixed(_mixed(name) ^ self._steps[weight]))
            decay = decay_of(weight, self._config)
            formula = _formula(self._config, lr, gradient_scale, self._steps[weight], seed, decay)
            _step([weight.live.detach(), *state.values(), weight.sum()], formula)

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight, name, tensor) of all there is to save: masters are put together for it."""
        for weight, state in self._states.items():
            yield weight.name, "master", _master(weight.live.detach(), state["remainder"])
            if steps := self._steps[weight]:
                yield weight.name, "exp_avg", state["exp_avg"]
                yield weight.name, "exp_avg_sq", state["exp_avg_sq"]
                yield weight.name, "step", torch.tensor(float(steps))

    def begin_load(self) -> None:
        """Forget the moments: those that come are filled in."""
        self._steps = dict.fromkeys(self.weights, 0)
        for state in self._states.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    def fill(self, weight: Weight, name: str, shard: Shard) -> int:
        """Copy the elements of a shard that belong to this rank; returns how many. A master is split at once."""
        state, like = self._states[weight], weight.source.detach()
        if name == "step":
            self._steps[weight] = int(shard.tensor)
            return weight.live.numel()
        if name != "master":
            return fill_blocks(blocks_of(like, state[name]), shard)
        count, remainders = 0, blocks_of(like, state["remainder"])
        for (offset, live), (_, remainder) in zip(blocks_of(like, weight.live.detach()), remainders, strict=True):
            live, master = overlap(offset, live, shard)
            _split(master, live, overlap(offset, remainder, shard)[0])
            count += master.numel()
        return count

    def refresh(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
        for state in self._states.values():
            state["remainder"].zero_()

    def move(self, to_host: bool) -> None:
        """Everything but the live weights to host memory, or back to where these are."""
        for weight, state in self._states.items():
            device = torch.device("cpu") if to_host else weight.live.device
            state.update({name: tensor.to(device) for name, tensor in state.items()})


def _formula(
    config: OptimConfig, lr: float, gradient_scale: float, steps: int, seed: int, weight_decay: float
) -> tuple[float, ...]:
    """The numbers of a step, as the compiled kernel takes them; `seed` is an int32."""
    beta1, beta2 = config.betas
    step_size, second_scale = lr / (1 - beta1**steps), 1 / math.sqrt(1 - beta2**steps)
    return seed, gradient_scale, beta1, beta2, step_size, second_scale, config.adam_eps, 1 - lr * weight_decay


def _numbers(formula: tuple[float, ...]) -> Tensor:
    """The same, int32 `[10]`, as `_update` takes it: the seed, and the bits of nine fp32 numbers. Differences are taken
    in fp64, before they are rounded."""
    seed, scale, beta1, beta2, *rest = formula
    floats = torch.tensor((scale, beta1, 1 - beta1, beta2, 1 - beta2, *rest), dtype=torch.float32)
    return torch.cat([torch.tensor([seed], dtype=torch.int32), floats.view(torch.int32)])


def _step(tensors: list[Tensor], formula: tuple[float, ...]) -> None:
    """One step of a weight; `tensors` as of `_update`."""
    live = tensors[0]
    suits = live.numel() % VECTOR == 0 and all(t.is_contiguous() for t in tensors)
    if suits and (compiled := kernels(live.dtype, live.device)) is not None:
        compiled.adamw(*tensors, live.numel(), *formula, tensors[2].dtype == torch.bfloat16)
        return
    # A view where the memory allows it; otherwise the results are copied back.
    flat = [t.reshape(-1) for t in tensors]
    update, block = _code(live.device.type)
    numbers = _numbers(formula).to(live.device, non_blocking=True)
    for start in range(0, live.numel(), block):
        # Of an element's number the lowest 32 bits count.
        first = torch.full((), _signed(start), dtype=torch.int32, device=live.device)
        update(*(t[start : start + block] for t in flat), numbers, first)
    for tensor, values in zip(tensors[:-1], flat, strict=False):
        if tensor.data_ptr() != values.data_ptr():
            tensor.copy_(values.view(tensor.shape))


@cache
def _code(kind: str) -> tuple[Callable[..., None], int]:
    """The function that updates a part of a weight, and its most elements: on an accelerator one kernel for all."""
    if not is_accelerator(kind):
        return _update, _BLOCK
    if (lack := lacking(kind)) is None:  # one kernel for weights of any size
        return torch.compile(_update, dynamic=True, fullgraph=True), _LARGEST
    logger.warning(
        "AdamW runs on '%s' by single torch operations, which is slower than one fused kernel: %s", kind, lack
    )
    return _update, min(_LARGEST, total_memory(kind) // (100 * _TEMPORARIES))


def _update(
    live: Tensor, remainder: Tensor, first: Tensor, second: Tensor, gradient: Tensor, numbers: Tensor, start: Tensor
) -> None:
    """One step of `[N]` elements from number `start`, in place. All that changes from step to step comes in tensors:
    torch would compile a Python number into the kernel."""
    scale, beta1, rest1, beta2, rest2, step_size, second_scale, eps, decay = numbers[1:].view(torch.float32).unbind()
    g = gradient * scale
    m = first.float() * beta1 + g * rest1
    v = second.float() * beta2 + g * g * rest2
    master = _master(live, remainder) * decay
    master -= step_size * m / (v.sqrt() * second_scale + eps)
    index = torch.arange(live.numel(), dtype=torch.int32, device=live.device)
    noise = _mixed((index + start) ^ numbers[0])
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
