"""Write `verl/report/assets/metrics.json`, which says on the page what a metric means, from docs/metrics.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, FILE = ROOT / "docs" / "metrics.md", ROOT / "verl" / "report" / "assets" / "metrics.json"


def meanings(page: str) -> dict[str, str]:
    """Metric, or a pattern of several -> what it is and what is normal, as text without marks. A name stands before
    the patterns that it is of."""
    texts: dict[str, str] = {}
    for line in page.splitlines():
        if not line.startswith("| `"):
            continue
        names, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        about, *normal = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "") for cell in cells]
        text = about + "".join(f". Normal: {each}" for each in normal if each)
        texts |= dict.fromkeys(re.findall(r"`([^`]+)`", names), re.sub(r" \([\w.]+\.md\)", "", text))
    return dict(sorted(texts.items(), key=lambda item: "*" in item[0]))


def main() -> None:
    FILE.write_text(json.dumps(meanings(PAGE.read_text(encoding="utf-8")), indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
