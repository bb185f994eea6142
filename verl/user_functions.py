"""A function from a user's file, imported once as a module of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from verl.errors import ConfigError, RewardError, nearest
from verl.user_code import describe

DEFAULT_FUNCTION = "compute_score"
#: Modules imported from users' files, by the names that they have here.
user_modules: dict[str, ModuleType] = {}
_real = cache(os.path.realpath)  # of folders of modules: hundreds, which are asked for at each start of a run
#: SHA-256 of these files as they were imported.
_imported: dict[Path, str] = {}


def split_spec(spec: str) -> tuple[Path, str]:
    """File and function of "file.py:function"; without a function, verl's `compute_score`."""
    path, colon, name = spec.rpartition(":")
    if not colon or path == "" or name.endswith(".py"):
        path, name = spec, DEFAULT_FUNCTION
    return Path(path), name


def digest(spec: str) -> str:
    """SHA-256 of the file of "file.py:function"."""
    return hashlib.sha256(split_spec(spec)[0].read_bytes()).hexdigest()


def user_files() -> dict[str, str]:
    """SHA-256 of the files of users' code that this process runs, by path (relative, below the working folder): those
    that settings name, as they were imported, and what these import from their own folders."""
    folders = {str(path.parent) for path in _imported}
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Of thousands of modules all but a few are passed over by their folders, of which there are hundreds.
    near = {name for name in names if name and (_real(os.path.dirname(name)) in folders or os.path.islink(name))}
    beside = {path for name in near if str((path := Path(name).resolve()).parent) in folders and path.is_file()}
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in beside - _imported.keys()} | _imported
    here = Path.cwd()
    return {
        str(path.relative_to(here) if path.is_relative_to(here) else path): digests[path] for path in sorted(digests)
    }


def load_function(spec: str) -> Callable[..., Any]:
    """The function or class that "file.py:name" names. It is the user's own code and is not sandboxed.

    Raises:
        ConfigError: there is no such file, or no such function in it.
        RewardError: the file cannot be imported; its own error is the cause.
    """
    path, name = split_spec(spec)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give FILE.py:NAME")
    module = _import(path.resolve())
    function = getattr(module, name, None)
    if not callable(function):
        names = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(f"{path} has no function or class '{name}': {nearest(name, names)}")
    return function  # type: ignore[no-any-return]


class _Uncached(SourceFileLoader):
    """Compiles the file as it is: Python's cached bytecode stays valid for edits of equal size within a second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(path: Path) -> ModuleType:
    name = f"verl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in user_modules:
        return user_modules[name]
    loader = _Uncached(name, str(path)) if path.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    _imported[path] = digest(str(path))
    module = importlib.util.module_from_spec(spec)
    user_modules[name] = sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's file may raise anything, exit included
        del user_modules[name], sys.modules[name], _imported[path]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise RewardError(f"{path} cannot be imported: {describe(error)}") from error
    return module
