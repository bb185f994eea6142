"""The import path `verl.critic`; the home is `verl.roles.critic`."""

from verl.roles.critic import Critic

__all__ = ["Critic"]
