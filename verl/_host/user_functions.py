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

from verl._base.durable import digest
from verl._host.user_code import NOT_THE_USERS, describe
from verl.errors import ConfigError, RewardError, nearest

#: Modules imported from users' files, by the names that they have here.
user_modules: dict[str, ModuleType] = {}
_real = cache(os.path.realpath)  # of folders of modules: hundreds, which are asked for at each start of a run
#: SHA-256 of these files as they were imported, and of those that other processes of the run have imported.
_imported: dict[Path, str] = {}
elsewhere: dict[str, str] = {}
#: Files that `new_user_files` has returned, and how many modules and files there were.
_returned: dict[str, object] = {}


def split_spec(spec: str) -> tuple[Path, str]:
    """File and function of "file.py:function"; without a function, verl's `compute_score`."""
    path, colon, name = spec.rpartition(":")
    if not colon or path == "" or name.endswith(".py"):
        path, name = spec, "compute_score"
    return Path(path), name


def user_files() -> dict[str, str]:
    """SHA-256 of the files of users' code, by path (relative, below the working folder): all modules that are neither
    installed nor the standard library's, here and in processes that rewards run in (`elsewhere`); those that settings
    name as they were imported."""
    modules = sys.modules.copy()
    # By their package: an installed one may make modules for itself.
    installed = {*sys.builtin_module_names}
    for package in {name.partition(".")[0] for name in modules}:
        if (file := getattr(modules.get(package), "__file__", None)) is not None and _is_installed_file(file):
            installed.add(package)
    others = (module for name, module in modules.items() if name.partition(".")[0] not in installed)
    names = {name for module in others if isinstance(name := getattr(module, "__file__", None), str)}
    paths = {Path(name).resolve() for name in names if name.endswith((".py", ".so")) and not _is_installed_file(name)}
    digests = {shown_path(path): digest(path) for path in paths - _imported.keys() if path.is_file()}
    return elsewhere | digests | {shown_path(path): sha for path, sha in _imported.items()}


def new_user_files() -> dict[str, str]:
    """Those that have been imported, here or in processes that rewards run in, since the last call."""
    count = (len(sys.modules), len(elsewhere))
    files = user_files() if _returned.get("count") != count else {}
    new = {path: sha for path, sha in files.items() if path not in _returned}
    _returned.update(new, count=count)
    return new


def shown_path(path: Path) -> str:
    """A path, relative below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _is_installed_file(file: str) -> bool:
    folder = _real(os.path.dirname(os.path.realpath(file) if os.path.islink(file) else file)) + os.sep
    return folder.startswith(NOT_THE_USERS) or f"-packages{os.sep}" in folder


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
        names = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
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
    _imported[path] = digest(path)
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
