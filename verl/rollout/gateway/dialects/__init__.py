"""The forms in which clients speak with the gateway: OpenAI's chat and responses, Anthropic's messages.

Each turns a body into one canonical request, and the canonical answer into a body or a stream of its own form. What
packages really send is in `tests/rollout/agent_bodies.py`. Reading order: `form`, `chat`, `responses`, `anthropic`.
"""
