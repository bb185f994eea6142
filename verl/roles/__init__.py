"""The handles a user holds: `Actor`, `Critic`, `Reward`, `Updater`. Their calls are the vocabulary of algorithms.

Reading order: `handle`, `actor`, `critic`, `reward`, `updater`, `settings`, `servers`, `backends`, `group`,
`workers`, `layouts`, `role_updater`, `reads`, `reference`, `columns`, `standalone`, `reward_pool`.
"""
