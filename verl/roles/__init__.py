"""The handles a user holds: `Actor`, `Critic`, `Reward`, `Updater`. Their verbs are the vocabulary of algorithms."""
