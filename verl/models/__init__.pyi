"""The public names of `verl.models`, for type checkers: made by `python scripts/stubs.py`."""

from verl.roles.backends import get_actor_critic as get_actor_critic
