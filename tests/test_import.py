import re
import subprocess
import sys

import verl


def test_import_is_light_and_every_public_name_is_there() -> None:
    code = (
        "import sys, verl;"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'pyarrow', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "missing = [name for name in verl.__all__ if getattr(verl, name, None) is None];"
        "assert not missing, missing"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_version_is_pep_440() -> None:
    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", verl.__version__)
