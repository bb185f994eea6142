"""volcengine's distribution `verl`, which has the same import name: files of both have one path, and the later
installation wins without a word."""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import PackagePath, distributions
from pathlib import Path

#: How to have this package alone.
MEND = (
    "keep one in an environment: pip uninstall -y verl verl-hybrid, then install the one you want "
    "(this one: pip install . in its source)"
)


def other_verl() -> tuple[str, list[str]] | None:
    """What to say of the other distribution, and the files of ours that it has replaced; None: it is not there."""
    other, here = (next(iter(distributions(name=name)), None) for name in ("verl", "verl-hybrid"))
    if other is None:
        return None
    folder, ours = Path(str(other.locate_file(""))), {str(file): file for file in (here and here.files) or ()}
    shared = [file for file in map(str, other.files or ()) if file in ours and ours[file].locate() == folder / file]
    replaced = [file for file in shared if _is_replaced(ours[file])]
    what = f"the distribution verl {other.version} (volcengine's) is installed in {folder}, with our import name"
    if shared:
        what += (
            f"; it has replaced {', '.join(replaced)}" if replaced else f" and {len(shared)} of our paths, ours so far"
        )
    return what, replaced


def _is_replaced(file: PackagePath) -> bool:
    """Whether what lies there is not what was installed; nothing is known of compiled files."""
    if file.hash is None:
        return False
    digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
