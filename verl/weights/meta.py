"""Models without weights: their parameters are on torch's meta device and take no memory until they are laid out over
ranks, so that a rank has memory for what it keeps alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import ModelError
from verl.weights.shard import Shard
from verl.weights.shards import named_weights, tied_names

#: More distinct layers than this are no sample of a model.
_MOST_LAYERS = 8
#: Embeddings of a sample; more than the probes have tokens.
_VOCABULARY = 64


def is_on_meta(model: nn.Module) -> bool:
    return any(weight.is_meta for weight in model.parameters())


def on_meta(make: Callable[[], Any], device: torch.device | str = "cpu") -> Any:
    """A transformers model without weights. Its buffers are on `device`, filled by the model's own code."""
    with torch.device("meta"):
        model = make()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for weight in model.parameters():  # what transformers leaves alone when it fills a model in
        weight._is_hf_initialized = True
    with torch.random.fork_rng(), torch.no_grad():
        model.initialize_weights()
    return model.eval()


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device | str) -> None:
    """Give parameters without memory some, not filled in: of cut ones, to this rank's parts. Tied ones stay tied."""
    tied = tied_names(model)
    model._apply(lambda tensor: _with_memory(tensor, device) if tensor.is_meta else tensor)
    _tie(model, tied)


@torch.no_grad()
def take_weights(model: nn.Module, shards: Iterable[Shard]) -> None:
    """Give a model, which may have none, the weights of a stream that has all of them: the very tensors, where they are
    whole and in the model's dtype (they may be mapped files); others are put together. Tied ones stay tied."""
    weights, state = dict(named_weights(model)), dict[str, Tensor]()
    for shard in shards:
        weight = weights[shard.name]
        if shard.is_whole:
            state[shard.name] = shard.tensor.to(weight.dtype)
        else:
            whole = state.setdefault(shard.name, torch.empty_like(weight, device="cpu"))
            shard.slice.of(whole).copy_(shard.tensor)
    tied = tied_names(model)
    state |= {other: state[first] for first, others in tied.items() for other in others}
    model.load_state_dict(state, assign=True)
    _tie(model, tied)


def _tie(model: nn.Module, tied: Mapping[str, Sequence[str]]) -> None:
    """Make the weights of these names (see `tied_names`) one again."""
    for first, others in tied.items():
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(owner), name, attrgetter(first)(model))


def _with_memory(tensor: Tensor, device: torch.device | str) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return DTensor(torch.empty_like(tensor._local_tensor, device=device), tensor._spec, requires_grad=False)


def sample(model: Any, device: torch.device | str = "cpu", layers: int = 1) -> Any:
    """A small model that computes as `model` does, which may have no weights: of its class, with its first layers (as
    many as show every kind of layer that it has, and at least `layers`), few embeddings and random weights.

    Raises:
        ModelError: its layers differ too much, or it has none.
    """
    text = model.config.get_text_config()
    count = int(text.num_hidden_layers)
    stacks = stacks_of(model, count)
    kinds = [_kind(layer) for layer in stacks[0]] if stacks else []
    depth = max(layers, max((kinds.index(kind) for kind in kinds), default=count) + 1)
    if depth > min(_MOST_LAYERS, count):
        raise ModelError(f"the layers of {type(model).__name__} are of too many kinds for a sample of them")
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    if text.vocab_size > _VOCABULARY:
        text.vocab_size, text.pad_token_id = _VOCABULARY, None
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        small = type(model)._from_config(config, dtype=dtype)
        for weight in small.parameters():  # an error in what a layer adds must not drown in what it adds to
            scale = 1.5 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1
            weight.add_(torch.randn_like(weight), alpha=scale)
    return small.to(device).eval()


def stacks_of(model: nn.Module, layers: int) -> list[nn.ModuleList]:
    """The lists of modules that may be the layers of a model: those that have so many."""
    return [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == layers]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells a layer from others: its modules, their settings and the shapes of their weights."""
    kinds = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and key not in ("layer_idx", "training")
        }
        shapes = [(key, tuple(weight.shape)) for key, weight in module.named_parameters(recurse=False)]
        kinds.append((name, type(module), tuple(sorted(settings.items())), tuple(shapes)))
    return tuple(kinds)
