"""Values between the ranks of a torchrun job: JSON, followed by bytes. Nothing is pickled, nothing unpickled.

An object that every rank has made before the first call travels as its number (`ranks.registry`), a module-level
function or class as its qualified name, a dataclass or pydantic model as its class and fields, tensors and Arrow tables
as raw bytes. A live model travels as its class, its configuration and its weights. Anything else is refused by name.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

import verl.errors
from verl._host.ranks import registry, who
from verl._host.user_functions import load_function, user_modules
from verl.algorithms.base import BaseAlgorithm
from verl.batch import Batch
from verl.errors import ClusterError, ConfigError
from verl.models.loading import load_tokenizer
from verl.models.portable import PortableModel

_PLAIN: tuple[Any, ...] = (bool, int, float, str)


def encode(value: Any, buffers: list[torch.Tensor]) -> Any:
    """A value as JSON; its buffers (`uint8`, one dimension) are appended to `buffers`.

    Raises:
        ConfigError: it cannot travel; says what to do.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if (plain := next((kind for kind in _PLAIN if isinstance(value, kind)), None)) is not None:
        return plain(value)  # of a number of numpy, or an enumeration
    if type(value) is list:
        return [encode(item, buffers) for item in value]
    if (number := registry.numbers.get(id(value))) is not None:
        known = {"$": "known", "number": number}
        return _with_fields(known, value, buffers) if isinstance(value, BaseAlgorithm) else known
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        buffers.append(flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8))
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$": "tensor", "at": len(buffers) - 1, "dtype": dtype, "shape": list(value.shape)}
    for name, (kind, parts, _) in _FORMS.items():
        if isinstance(value, kind):
            return {"$": name, "parts": encode(parts(value), buffers)}
    if dataclasses.is_dataclass(value) or isinstance(value, BaseModel):
        return _with_fields({"$": "record", "name": _name(type(value))}, value, buffers)
    raise ConfigError(
        f"{getattr(value, '__qualname__', type(value).__qualname__)} ({type(value).__module__}) was made after the "
        "first call: the other ranks of the torchrun job do not run the script any more, and nothing is pickled. "
        "Make it, and the handle that it belongs to, before the first call; or give a module-level function, a "
        "dataclass, or 'FILE.py:NAME'"
    )


def _with_fields(tree: dict[str, Any], value: Any, buffers: list[torch.Tensor]) -> dict[str, Any]:
    """Add a record's fields, and an algorithm's state: they may change from batch to batch. Options of an algorithm
    that the other rank knows keep their values there if they cannot be encoded."""
    tree["fields"] = {}
    for name in _field_names(type(value)):
        held = len(buffers)
        try:
            tree["fields"][name] = encode(getattr(value, name), buffers)
        except ConfigError:
            if tree["$"] == "record":
                raise
            del buffers[held:]
    return {**tree, "state": encode(value.state_dict(), buffers)} if isinstance(value, BaseAlgorithm) else tree


def decode(tree: Any, buffers: list[torch.Tensor]) -> Any:
    """The value that `encode` was given.

    Raises:
        ClusterError: the message names what is not there, or fields that its class does not have.
    """
    if isinstance(tree, list):
        return [decode(item, buffers) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind in _FORMS:
        _, _, whole = _FORMS[kind]
        return whole(decode(tree["parts"], buffers))
    if kind == "tensor":
        dtype, raw = _dtype(tree["dtype"]), buffers[tree["at"]]
        return (raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)).reshape(tree["shape"])
    fields = {name: decode(value, buffers) for name, value in tree.get("fields", {}).items()}
    if kind == "known":
        target = registry.objects[tree["number"]]
        for name, value in fields.items():
            setattr(target, name, value)
    elif kind == "record":
        cls = _named(tree["name"])
        is_record = isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, BaseModel))
        if not is_record or not fields.keys() <= {*_field_names(cls)}:
            raise ClusterError(f"a message between ranks has fields that {tree['name']} lacks: {sorted(fields)}")
        target = cls(**fields)
    else:
        raise ClusterError(f"a message between ranks has a value of unknown kind {kind!r}")
    if "state" in tree:
        target.load_state_dict(decode(tree["state"], buffers))
    return target


def _items(value: tuple[Any, ...]) -> list[Any]:
    if type(value) is not tuple:  # a named tuple is a class of its own
        raise ConfigError(f"a {type(value).__qualname__} cannot travel to another rank: give a plain tuple")
    return list(value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ClusterError(f"a message between ranks names the dtype {name!r}, which there is not")
    return dtype


def _files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _tokenizer(files: Mapping[str, bytes]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / Path(name).name).write_bytes(content)
        return load_tokenizer(folder)


#: How values of a kind travel: as parts, of kinds that have a form themselves, and made again of these. In the order in
#: which they are tried.
_FORMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (
        bytes | bytearray | memoryview,
        lambda value: torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0).byte(),
        lambda tensor: bytes(tensor.numpy()),
    ),
    "batch": (Batch, Batch.to_ipc, Batch.from_ipc),
    "tuple": (tuple, _items, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "mapping": (Mapping, lambda value: [[key, item] for key, item in value.items()], dict),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
    "path": (Path, str, Path),
    "partial": (
        partial,
        lambda value: [value.func, list(value.args), dict(value.keywords)],
        lambda parts: partial(parts[0], *parts[1], **parts[2]),
    ),
    "model": (  # or the model itself, if all ranks know it
        PortableModel,
        lambda value: value.parts() if id(value.model) not in registry.numbers else value.model,
        lambda parts: PortableModel.of_parts(parts) if isinstance(parts, dict) else PortableModel(parts),
    ),
    "name": (FunctionType | type, lambda value: _name(value), lambda name: _named(name)),
    "tokenizer": (PreTrainedTokenizerBase, _files, _tokenizer),
}


def decode_error(kind: str, text: str, about: str) -> Exception:
    """The exception, if its type is one of ours or of Python's; else a `ClusterError` with its name and text."""
    cls = getattr(verl.errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            return cls(text)
        except TypeError:  # one that takes more than a text
            pass
    return ClusterError(f"{about}: {kind}: {text}")


def _field_names(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if field.init]
    return list(cls.model_fields)


def _name(value: Any) -> str:
    """ "MODULE:QUALNAME" of a module-level function or class; of one in a user's own file "FILE.py:NAME"."""
    module, qualname = value.__module__, value.__qualname__
    if module in user_modules:
        return f"{user_modules[module].__file__}:{qualname}"
    if _found(module, qualname) is not value:
        raise ConfigError(
            f"{qualname} of {module} is no module-level function or class, and nothing is pickled under torchrun: "
            "define it at the top of a module, or give it to a handle before the first call"
        )
    return f"{module}:{qualname}"


def _named(name: str) -> Any:
    module, _, qualname = name.rpartition(":")
    if module.endswith(".py"):
        return load_function(name)
    # A message may not import other modules: this rank's script has imported them, or does not know them.
    if module.split(".")[0] in ("verl", "transformers"):
        importlib.import_module(module)
    target = _found(module, qualname)
    if not isinstance(target, FunctionType | type) or target.__module__ != module:
        raise ClusterError(
            f"{qualname} of {module} is not on {who()}: define it, or import its module, before the first call"
        )
    return target


def _found(module: str, qualname: str) -> Any:
    target: Any = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    return target
