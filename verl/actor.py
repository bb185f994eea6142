"""The import path `verl.actor`; the home is `verl.roles.actor`."""

from verl.roles.actor import Actor

__all__ = ["Actor"]
