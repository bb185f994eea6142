"""Attention over packed rows, on every device.

Reading order: `prefix_tree`, `segments`, `flash`, `varlen`.
"""
