"""Rewards: functions of several signatures, reward models, verifiers, judges, and their sums.

Reading order: `source`, `functions`, `signatures`, `calls`, `processes`, `scores`, `generators`, `failures`, `answers`,
`values`, `equality`, `maths`, `by_source`, `code`, `codebleu`, `model`, `remote`, `reasoning_gym`,
`composite`, `environments`, `make`, `registry`.
"""
