"""The gateway: agents that know nothing but the address of an endpoint, as episodes.

Reading order: `messages`, `template`, `linking`, `dialects`,
`forced`, `session`, `server`, `agents`, `gateway`.
"""
