"""What one rank of a role does: the calls behind the handles.

Reading order: `trained`, `actor`, `critic`, `reward`, `update`, `generation`, `streams`, `sync`, `saving`, `scorer`,
`pooled`, `standalone`.
"""
