"""How many examples property tests try: a tenth in `make test`, all in the slow tests (`test_properties.py`)."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

settings.register_profile("quick", max_examples=10, deadline=None)
settings.register_profile("full", max_examples=100, deadline=None)
settings.load_profile("quick")  # unless --hypothesis-profile says otherwise


def examples(count: int, **options: Any) -> settings:
    """`hypothesis.settings` of `count` examples in full, and a share of them in the quick profile."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100), deadline=None, **options)
