"""Rewards: functions in all their forms, reward models, verifiers, and what is made of them."""
