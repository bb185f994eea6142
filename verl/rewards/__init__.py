"""Rewards: functions in all their forms, reward models, verifiers, and what is made of them.

Reading order: `source`, `functions`, `forms`, `calls`, `processes`, `scores`, `generators`, `failures`, `answers`,
`values`, `equality`, `maths`, `by_source`, `code`, `codebleu`, `model`, `remote`, `reasoning_gym`,
`composite`, `environments`, `make`, `registry`.
"""
