"""Where memory is: bytes of tensors by role, and within a role by what holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: What is looked into: containers, and objects of these packages.
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PACKAGES = ("verl", "torch.nn", "torch.optim", "transformers")


def memory_by_role(roles: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of the tensors that each role's object can reach, each storage counted once, for the first role that has
    it: `memory_by_role({"actor": actor, "critic": critic})`.

    Within a role: `weights` (parameters and buffers of modules), `gradients`, and for all other tensors the class
    that holds them, such as the optimizer's or the KV cache's. Tensors in other processes are not seen; of those that
    ranks share, the part that is here.
    """
    seen: set[int] = set()
    by_role = {}
    for role, thing in roles.items():
        sizes: Counter[str] = Counter()
        for kind, tensor in _tensors(thing, type(thing).__name__, set()):
            local = getattr(tensor, "_local_tensor", tensor)  # of one that is cut over ranks, the piece that is here
            if local.is_meta:  # shapes alone
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                sizes[kind] += storage.nbytes()
        by_role[role] = dict(sizes)
    return by_role


def _tensors(thing: Any, holder: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(thing, Tensor):
        yield ("weights" if isinstance(thing, nn.Parameter) else holder), thing
        if thing.is_leaf and thing.grad is not None:
            yield "gradients", thing.grad
        return
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, nn.Module):
        # Before its attributes are walked, where buffers would count under the class of the module that holds them.
        for tensor in (*thing.parameters(), *thing.buffers()):
            yield from _tensors(tensor, "weights", visited)
    for part in _parts(thing):
        yield from _tensors(part, holder if isinstance(thing, _CONTAINERS) else type(thing).__name__, visited)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, _CONTAINERS):
        return list(thing)
    if hasattr(thing, "__closure__"):  # what a function or a recipe holds on to
        return [cell.cell_contents for cell in thing.__closure__ or () if cell is not None]
    if hasattr(thing, "__self__") and not isinstance(thing.__self__, type(torch)):
        return [thing.__self__]
    if not type(thing).__module__.startswith(_PACKAGES):
        return []
    slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return [*getattr(thing, "__dict__", {}).values(), *slots]
