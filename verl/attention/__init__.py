"""Attention over packed rows, on every device.

Reading order: `segments`, `varlen`.
"""
