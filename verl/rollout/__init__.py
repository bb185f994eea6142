"""Rollout: prompts in, finished samples out, whichever engine."""
