"""The dialects in which clients speak with the gateway: OpenAI's chat and responses, Anthropic's messages.

What packages really send is in `tests/rollout/agent_bodies.py`. Reading order: `base`, `chat`, `responses`,
`anthropic`.
"""
