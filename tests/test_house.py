"""The house: which package may import which, and what each says of itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from scripts.code_lines import code_lines
from tests.package import modules

#: From the roof down. A package imports those of the lines below, and modules of its own folder.
FLOORS = (
    "cli",
    "trl tune compat",
    "run",
    "trainer",
    "checkpoint report",
    "dataflow",
    "config",
    "roles",
    "workers utils",
    "cluster",
    "rollout training",
    "algorithms rewards planner",
    "models",
    "data sandbox",
    "attention",
    "kernels",
    "weights",
    "ground",
    "_host",
    "_base",
)
#: Files that are no package: import paths of the handles, errors, and the command line's.
FACADES = {
    "actor": "roles",
    "critic": "roles",
    "reward": "roles",
    "worker": "roles",
    "errors": "_base",
    "__main__": "cli",
}
ROOT = Path(__file__).resolve().parents[1]


def module_name(place: str) -> str:
    """ "trainer/__init__.py" -> "trainer"; "" is the root."""
    return ".".join(Path(place).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def imports(tree: ast.AST, known: frozenset[str]) -> Iterator[str]:
    """The modules of the package that code imports when it runs, at once or in a function; "" is the root."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name[5:] for name in node.names if f"{name.name}.".startswith("verl."))
        elif isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith("verl."):
            parent = node.module[5:]
            inner = (f"{parent}.{name.name}".lstrip(".") for name in node.names)
            yield from (name if name in known else parent for name in inner)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = (part.value for part in node.args if isinstance(part, ast.Constant))
            yield from (name[5:] for name in named if isinstance(name, str) and name.startswith("verl."))
        else:
            yield from imports(node, known)


@cache
def graph() -> dict[str, frozenset[str]]:
    """Module -> what it imports."""
    trees = {module_name(place): tree for place, (_, tree) in modules().items()}
    return {name: frozenset(imports(tree, frozenset(trees))) - {name} for name, tree in trees.items()}


@cache
def packages() -> frozenset[str]:
    return frozenset(place.split("/")[0] for place in modules() if "/" in place)


def room(module: str) -> str:
    first = module.split(".")[0]
    return first if first in packages() else FACADES.get(first, "ground") if first else "root"


def floor(name: str) -> int:
    return next(number for number, line in enumerate(FLOORS) if name in line.split())


def test_the_search_sees_imports_of_every_form() -> None:
    code = (
        "import verl.run.train\nfrom verl import errors\ndef f():\n    from verl.models import lora, X\n"
        "if TYPE_CHECKING:\n    import verl.cli\nfrom verlx import y\nx = import_module('verl.tune').y\n"
    )
    found = set(imports(ast.parse(code), frozenset({"run.train", "errors", "models", "models.lora"})))
    assert found == {"run.train", "errors", "models.lora", "models", "tune"}


def test_every_package_has_a_floor() -> None:
    assert sorted(packages() | {"ground"}) == sorted(name for line in FLOORS for name in line.split())


def test_no_import_goes_up() -> None:
    """Neither to a floor above nor to a neighbour on the same floor. The root, which has every public name, is for
    `run` and what is above it."""
    upward = set()
    for module, targets in graph().items():
        for target in targets if module else ():
            start, end = room(module), room(target)
            above = floor(start) > floor("run") if end == "root" else start != end and floor(end) <= floor(start)
            if above:
                upward.add(f"{module} -> {target or 'verl'}")
    assert sorted(upward) == []


def circles(edges: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (strongly connected components)."""
    reached = {module: set(targets & edges.keys()) for module, targets in edges.items()}
    for module in edges:
        for targets in reached.values():
            targets |= reached[module] if module in targets else set()
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in edges}
    return sorted(sorted(group) for group in groups if group)


def test_the_search_finds_circles() -> None:
    edges = {"a": "b", "b": "cd", "c": "a", "d": "e", "e": "f", "f": "e", "g": "a", "h": ""}
    assert circles({module: frozenset(targets) for module, targets in edges.items()}) == [["a", "b", "c"], ["e", "f"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even inside functions; imports for types alone are apart."""
    assert not circles(graph())


@pytest.mark.parametrize("folder", sorted({place.rpartition("/")[0] for place in modules()} - {""}))
def test_a_folder_says_its_subject_and_its_reading_order(folder: str) -> None:
    _, tree = modules()[f"{folder}/__init__.py"]
    subject, _, order = (ast.get_docstring(tree) or "").partition("Reading order: ")
    inside = [
        Path(place).relative_to(folder).with_suffix("").parts for place in modules() if place.startswith(f"{folder}/")
    ]
    there = {parts[0] for parts in inside} - {"__init__"}
    assert subject and sorted(re.findall(r"`(\w+)`", order)) == sorted(there)


def test_the_picture_and_the_table_of_the_house_are_this_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = re.search(r"```\n(.*?)```", page, re.DOTALL)
    rows = re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \|", page, re.MULTILINE)
    assert picture is not None
    lines = [re.split(r"\s{4,}", line.strip().replace("      ·      ", " · "))[0] for line in picture[1].splitlines()]
    assert [line.replace(" · ", " ").split() for line in lines] == [line.split() for line in FLOORS]
    assert [" ".join(re.findall(r"`(\w+)/`", row)) for row in rows] == [line for line in FLOORS if line != "ground"]


def test_no_worker_is_called_by_a_string() -> None:
    """A call names the method itself, `group.call(ActorWorker.update, ...)`: editors and type checkers follow it."""
    calls = [
        (place, ast.unparse(node.func.value), node.args[0])
        for place, (_, tree) in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "call"
        and node.args
    ]
    of_groups = [(place, method) for place, target, method in calls if target.endswith(("group", "_reference"))]
    assert len(of_groups) > 15  # the search sees them
    assert [(place, ast.unparse(m)) for place, m in of_groups if isinstance(m, ast.Constant | ast.JoinedStr)] == []


def shape(node: object) -> object:
    """A syntax tree without names and constants."""
    if isinstance(node, list):
        return tuple(map(shape, node))
    if not isinstance(node, ast.AST):
        return None
    return type(node).__name__, *(shape(value) for _, value in ast.iter_fields(node))


def long_runs(tree: ast.AST, least: int = 10) -> Iterator[list[ast.stmt]]:
    """Statements that follow each other, each run as short as it can be of so many lines. Declarations (imports, fields
    of records, docstrings) are no code that could be shared."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            code = [
                statement
                for statement in (block if isinstance(block, list) else [])
                if not isinstance(statement, _DECLARATIONS)
                and not isinstance(getattr(statement, "value", None), ast.Constant | ast.JoinedStr)
            ]
            lengths = [(statement.end_lineno or 0) - statement.lineno + 1 for statement in code]
            for start in range(len(code)):
                ends = (end for end in range(start + 1, len(code) + 1) if sum(lengths[start:end]) >= least)
                if (end := next(ends, None)) is not None:
                    yield code[start:end]


_DECLARATIONS = (ast.Import, ast.ImportFrom, ast.AnnAssign, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_list_of_names(statement: ast.stmt) -> bool:
    """`__all__`: two that have as many names are no code twice."""
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"


def clones(trees: dict[str, ast.Module]) -> list[str]:
    """Pairs of places whose code is the same but for names and constants."""
    numbers: dict[object, int] = {}  # of the shapes of statements
    known: dict[tuple[int, ...], tuple[str, int, int]] = {}
    pairs = []
    for place, tree in trees.items():
        number_of = {
            statement: numbers.setdefault(shape(statement), len(numbers))
            for statement in ast.walk(tree)
            if isinstance(statement, ast.stmt) and not isinstance(statement, _DECLARATIONS)
        }
        for run in long_runs(tree):
            if all(map(is_list_of_names, run)):
                continue
            here = (place, run[0].lineno, run[-1].end_lineno or 0)
            there = known.setdefault(tuple(number_of[statement] for statement in run), here)
            if there[0] != place or there[2] < here[1]:
                pairs.append(f"{there[0]}:{there[1]} {place}:{here[1]}")
    return pairs


def test_the_search_finds_clones() -> None:
    code = "def f(a):\n    b = a\n" + "".join(f"    b += g({n})\n" for n in range(9)) + "    return b\n"
    other = code.replace("b", "x").replace("(a)", "(y)").replace("= a", "= y").replace("g(3)", "h(7)")
    assert clones({"one": ast.parse(code), "two": ast.parse(other)})
    assert not clones({"one": ast.parse(code), "two": ast.parse(other.replace("+= h", "-= h"))})


def test_no_code_is_there_twice() -> None:
    assert clones({place: tree for place, (_, tree) in modules().items()}) == []


#: Lines of code that a reader can take in at once.
MOST_IN_A_FILE, MOST_IN_A_FUNCTION = 500, 60


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, which begins with those of the classes and functions that it stands in."""
    for node in ast.iter_child_nodes(tree):
        name = f"{above}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{name}." if is_named else above)


def sizes() -> Iterator[tuple[str, int, int]]:
    """Name, lines of code and their bound, of each file and each function (from its `def` on) that has more lines of
    any kind. Lines of code are those without docstrings, comments and blank lines."""
    for place, (text, tree) in modules().items():
        spans = {name: range(node.lineno, (node.end_lineno or 0) + 1) for name, node in functions(tree)}
        long = {name: span for name, span in spans.items() if len(span) > MOST_IN_A_FUNCTION}
        lines = code_lines(text) if long or text.count("\n") > MOST_IN_A_FILE else set[int]()
        yield place, len(lines), MOST_IN_A_FILE
        for name, span in long.items():
            yield f"{place}:{name}", len(lines & {*span}), MOST_IN_A_FUNCTION


def test_lines_are_counted_without_docstrings_and_comments() -> None:
    text = "class A:\n    def f(x):\n        '''What.\n\n        More.'''\n        # why\n\n        return (\n x)\n"
    assert code_lines(text) == {1, 2, 8, 9}
    assert [name for name, _ in functions(ast.parse(text + "def g():\n    def h(): ...\n"))] == ["A.f", "g", "g.h"]


def test_no_file_and_no_function_is_too_long() -> None:
    large = [name for name, size, most in sizes() if size > most]
    assert not large
