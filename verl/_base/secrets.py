"""Credentials: noted where they come in, masked where text leaves: logs, errors, written settings, trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from verl.errors import ConfigError

MASK = "***"
#: Settings, variables of the environment and options of commands that hold a credential, by the end of their names.
_NAME = r"(?:api[_-]?key|access[_-]?key|secret[_-]?key|auth[_-]?token|access[_-]?token|secret|password|passwd)"
_SETTING = re.compile(rf"(?i)(?:.*[_-])?{_NAME}|token|authorization|(?:proxy|x)-.*")
_VARIABLE = re.compile(rf"(?i).*(?:{_NAME}|_TOKEN|_KEY|CREDENTIALS?)")
_OPTION = re.compile(rf"(?i)(--?(?:[\w-]*-)?(?:{_NAME}|token)(?:=|\s+|',\s*')|\bbearer\s+)[^\s'\"]+")
_URL = re.compile(r"(?<=://)[^\s'\"<>`]+")
#: The user and password of an address, and the values of its query, but for names of variables.
_USER, _QUERY = re.compile(r"^(?!\$\w+@|[\w.-]*:\$\w+@)[^/?#@]*@"), re.compile(r"(?<=[?&])([\w.%-]+=)(?!\$)[^&#]+")
_noted = set[str]()


def note_secret(text: str | None) -> None:
    """Have a text masked from now on, wherever it occurs."""
    # A shorter one may be a word, and is masked where its place says what it is.
    _noted.update(part for part in (text or "", unquote(text or "")) if len(part) >= 6)


def from_environment(text: str, kind: str) -> str:
    """A credential as it is; of "$NAME" the one in that variable of the environment.

    Raises:
        ConfigError: there is no such variable.
    """
    if text.startswith("$"):
        if not (value := os.environ.get(text[1:])):
            raise ConfigError(f"{kind}: a key is in the variable {text[1:]} of the environment, which is not set")
        text = value
    note_secret(text)
    return text


def key_of(api_key: str | None, kind: str) -> str | None:
    """A key for the header of a request: the text, or of "$NAME" that variable of the environment.

    Raises:
        ConfigError: there is no such variable, or no header can carry the key: sent, it would look like a server that
            fails.
    """
    api_key = None if api_key is None else from_environment(api_key, kind)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(f"{kind}: api_key has a character that no HTTP header can carry: give it in printable ASCII")
    return api_key


def is_secret(name: str) -> bool:
    """Whether a setting, a variable or a part of a query that is called so has a credential."""
    return bool(_SETTING.fullmatch(name) or _VARIABLE.fullmatch(name))


def masked(text: str) -> str:
    """The text without credentials: noted ones, those in the environment, users and queries of addresses, and values
    of options that are called so."""
    known = {value for name, value in os.environ.items() if len(value) >= 8 and _VARIABLE.fullmatch(name)}
    for secret in sorted(_noted | known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _masked_in_place(text)


def _masked_in_place(text: str) -> str:
    """Without the credentials that are such by their place."""
    text = _URL.sub(lambda url: _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", url[0])), text)
    return _OPTION.sub(rf"\1{MASK}", text)


def masked_settings(value: Any, name: str = "") -> Any:
    """Nested settings without those that are credentials by their place, whatever the environment has; the name of a
    variable ("$NAME") stays."""
    if isinstance(value, Mapping):
        return {key: masked_settings(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked_settings(item, name) for item in value)
    if not isinstance(value, str):
        return value
    return MASK if _SETTING.fullmatch(name) and value and not value.startswith("$") else _masked_in_place(value)
