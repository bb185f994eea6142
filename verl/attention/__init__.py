"""Attention over packed rows, on every device."""
