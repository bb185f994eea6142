"""Text of others (servers, models, files, exceptions) as it may be printed."""

from __future__ import annotations

import re

from verl._base.secrets import masked

#: What a terminal acts on, or what shows text in another order or place than it has: control characters but for tab and
#: line feed, line separators, marks of direction.
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str, indent: str = "  ") -> str:
    """The text with credentials masked, control characters spelt out, and lines after the first indented, so that none
    of them passes for a line of ours."""
    spelt = _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), masked(text))
    return re.sub(r"\n(?!\n|$)", f"\n{indent}", spelt)
