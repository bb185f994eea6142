import re
import subprocess
import sys
from pathlib import Path

import verl


def test_import_is_light() -> None:
    code = (
        "import sys, verl;"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'pyarrow', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_is_there() -> None:
    assert [name for name in verl.__all__ if getattr(verl, name, None) is None] == []


def test_version_is_pep_440() -> None:
    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", verl.__version__)


def test_every_public_name_has_its_line_in_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    names = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(names) == sorted(set(verl.__all__) - {"__version__"})


def test_every_page_of_the_docs_is_linked_from_the_index_that_the_readme_names() -> None:
    root = Path(__file__).parents[1]
    assert "(docs/index.md)" in root.joinpath("README.md").read_text()
    index, site = root.joinpath("docs", "index.md").read_text(), root.joinpath("mkdocs.yml").read_text()
    pages = sorted(page.name for page in (root / "docs").glob("*.md") if page.name != "index.md")
    assert [name for name in pages if f"({name})" not in index or name not in site] == []
