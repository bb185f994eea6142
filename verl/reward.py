"""The import path `verl.reward`; the home is `verl.roles.reward`."""

from verl.roles.reward import Reward

__all__ = ["Reward"]
