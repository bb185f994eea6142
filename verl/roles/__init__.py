"""The handles a user holds: `Actor`, `Critic`, `Reward`, `Updater`. Their calls are the vocabulary of algorithms.

Reading order: `actor`, `critic`, `reward`, `updater`, `handle`, `settings`, `backends`, `group`, `workers`,
`layouts`, `reads`, `columns`, `lora_base`, `standalone`, `reward_pool`.
"""
