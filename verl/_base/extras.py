"""Libraries that come with an extra of the package (`pip install 'verl-hybrid[EXTRA]'`)."""

from __future__ import annotations

import importlib
from typing import Any

from verl.errors import ConfigError


def load_extra(module: str, extra: str, what: str) -> Any:
    """The module of a library.

    Args:
        what: needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {module}, which is not installed: pip install 'verl-hybrid[{extra}]'"
        ) from error
