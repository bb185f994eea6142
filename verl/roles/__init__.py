"""The handles a user holds: `Actor`, `Critic`, `Reward`, `Updater`. Their calls are the vocabulary of algorithms."""
