"""Records, checks, names, files: the code that every other package builds on.

Reading order: `record`, `checked`, `keywords`, `names`, `combinations`, `schemas`, `durable`, `exact`, `secrets`,
`syntax`, `visible`, `extras`, `installed`, `later`, `autograd`.
"""
