"""The gateway: agents that know nothing but the address of an endpoint, as episodes.

Reading order: `messages`, `replies`, `template`, `tokens`, `linking`, `dialects`,
`forced`, `streaming`, `session`, `server`, `agents`, `gateway`.
"""
