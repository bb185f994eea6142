"""Open every page of the built site in a browser, wide and narrow, and say what a reader would trip over.

    make docs && python scripts/look_at_site.py [--site build/site] [--pictures FOLDER] [PAGE ...]

On each page: something beyond the right edge, a link or a picture that leads nowhere, text under 12 pixels, a block of
code that neither fits nor scrolls, an error of a script. `--pictures` keeps each page as PNG. Chromium is needed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402

WIDTHS = (1400, 390)
LEAST_TEXT = 12
#: What a page says of itself; lists are empty where all is well.
_LOOK = """(() => {
  const visible = { visibilityProperty: true, opacityProperty: true };
  const shown = (e) => e.checkVisibility(visible) && e.getClientRects().length;
  const named = (e) => `${e.tagName.toLowerCase()} "${e.textContent.trim().replace(/\\s+/g, " ").slice(0, 50)}"`;
  const overflow = (e) => getComputedStyle(e).overflowX;
  const scrolls = (e) => e && e !== document.body && (overflow(e) !== "visible" || scrolls(e.parentElement));
  const all = [...document.body.querySelectorAll("*")].filter(shown);
  const article = document.querySelector("article");
  const lines = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), small = new Set();
  for (let node; (node = lines.nextNode());) {
    const e = node.parentElement;
    if (node.data.trim() && shown(e) && parseFloat(getComputedStyle(e).fontSize) < LEAST) small.add(named(e));
  }
  return {
    "beyond the right edge": all.filter((e) => article.contains(e) && e.getBoundingClientRect().right > WIDTH + 1
      && !scrolls(e.parentElement)).map(named),
    "scrolls sideways": document.documentElement.scrollWidth > WIDTH ? ["the page"] : [],
    "text too small": [...small],
    "code cut off": all.filter((e) => e.tagName === "PRE" && e.scrollWidth > e.clientWidth + 1
      && ![e, ...e.querySelectorAll("code")].some((part) => overflow(part) === "auto")).map(named),
    "no such picture": [...document.images].filter((e) => !e.naturalWidth).map((e) => e.getAttribute("src")),
    links: [...new Set([...document.querySelectorAll("a[href]")].map((e) => e.href))],
    ids: [...document.querySelectorAll("[id], a[name]")].map((e) => e.id || e.name),
  };
})()"""


def target(link: str, site: Path) -> tuple[Path, str] | None:
    """The file that a link leads to, and the part of it; None where it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme != "file":
        return None
    path = Path(unquote(parts.path))
    return path / "index.html" if path.is_dir() else path, unquote(parts.fragment)


def faults(browser: Browser, site: Path, pages: list[Path], pictures: Path | None) -> Iterator[str]:
    """What is wrong, a line each."""
    ids: dict[Path, set[str]] = {}
    links: dict[str, Path] = {}
    for page in pages:
        name = page.parent.relative_to(site).as_posix().replace("/", "-").strip(".") or "index"
        for width in WIDTHS:
            browser.errors.clear()
            browser.open(page, width)
            look = browser.js(_LOOK.replace("LEAST", str(LEAST_TEXT)).replace("WIDTH", str(width)))
            ids[page] = set(look.pop("ids"))
            links |= {link: page for link in look.pop("links") if link not in links}
            for fault, things in look.items():
                yield from (f"{name} at {width}: {fault}: {thing}" for thing in things[:5])
            yield from (f"{name} at {width}: {error}" for error in browser.errors)
            if pictures is not None:
                browser.screenshot(pictures / f"{name}-{width}.png")
    for link, page in links.items():
        if (goal := target(link, site)) is None:
            continue
        file, part = goal
        if not file.is_file() or (part and file in ids and part not in ids[file]):
            yield f"{page.relative_to(site)}: a link leads nowhere: {link}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", help="as the site has them: agents, algorithms/grpo; all, where none is named"
    )
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    site = args.site.resolve()
    if not (site / "index.html").is_file():
        sys.exit(f"there is no site in {site}: make docs")
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    pages = [site / name.removesuffix("index") / "index.html" for name in args.pages] or sorted(
        site.rglob("index.html")
    )
    if missing := [str(page) for page in pages if not page.is_file()]:
        sys.exit(f"no such page: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(Path(folder)) as browser:
        count = 0
        for fault in faults(browser, site, pages, args.pictures):
            print(fault)
            count += 1
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} pixels: {count or 'no'} faults")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
