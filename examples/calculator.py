"""A policy that learns to use a tool: products it cannot do in its head, and a calculator. Used by calculator.yaml."""

from __future__ import annotations

from verl.rollout.tools import ToolEpisode, calculator

# `<<31 * 4>>` is a call; the result is put behind it, [124], masked, and the policy goes on.
episode = ToolEpisode([calculator], form="plain", max_turns=2, max_result_tokens=16)
