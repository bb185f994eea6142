"""A hook of mkdocs: a page for each algorithm, from its source and its recipe; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PAGE = """# {name}

{source}

```yaml
algorithm:
  name: {name}
```

```python
{python}
```

## What it does

{meaning}

## Options

They stand beside the name in YAML and are keywords of a trainer; one that an algorithm does not read is refused.

| option | takes | default | of |
|---|---|---|---|
{options}

## Recipe

`verl train examples/algorithms/{name}.yaml` (the same directory has the data and rewards that it names):

```yaml
{recipe}
```

All algorithms side by side: [Algorithms](../algorithms.md). What the metrics mean: [Metrics](../metrics.md).
"""


def classes() -> dict[str, tuple[ast.ClassDef, ast.Module]]:
    """All classes of `verl/algorithms`, by name, with their modules."""
    found = {}
    for path in sorted((ROOT / "verl" / "algorithms").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name: (node, module) for node in module.body if isinstance(node, ast.ClassDef)}
    return found


def registered(node: ast.ClassDef) -> str | None:
    """The name that the class is registered by."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_algorithm":
            return str(ast.literal_eval(call.args[0]))
    return None


def line_of(node: ast.ClassDef, known: dict[str, tuple[ast.ClassDef, ast.Module]]) -> list[ast.ClassDef]:
    """The class and those it is made from, nearest first."""
    bases = [known[ast.unparse(base)][0] for base in node.bases if ast.unparse(base) in known]
    return [node, *(one for base in bases for one in line_of(base, known))]


def _takes(annotation: ast.expr) -> str:
    """The type; `Annotated[float, Field(ge=0)]` as "float, ge=0"."""
    match annotation:
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([kind, ast.Call(ast.Name("Field"), keywords=bounds)])):
            return ", ".join([ast.unparse(kind), *map(ast.unparse, bounds)])
    return ast.unparse(annotation)


def options(line: list[ast.ClassDef]) -> Iterator[str]:
    """A row of the table for each option; a nearer class's default counts."""
    seen: set[str] = set()
    for node in line:
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or field.value is None:
                continue
            name, takes, default = field.target.id, _takes(field.annotation), ast.unparse(field.value)
            if name in seen or "ClassVar" in takes or "init=False" in default:
                continue
            seen.add(name)
            cells = (f"`{name}`", f"`{takes}`", f"`{default}`", f"`{node.name}`")
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(name: str, node: ast.ClassDef, known: dict[str, tuple[ast.ClassDef, ast.Module]]) -> str:
    line = line_of(node, known)
    recipe = (ROOT / "examples" / "algorithms" / f"{name}.yaml").read_text(encoding="utf-8")
    is_offline = "reward:" not in recipe
    python = (
        f'verl.Updater("{name}", actor=verl.Actor("MODEL"))'
        if is_offline
        else f'trainer = verl.Trainer(verl.Actor("MODEL"), reward_fn=f, algorithm="{name}")'
    )
    meaning = [f"**{one.name}.** {ast.get_docstring(one) or ''}" for one in line if one.name != "BaseAlgorithm"]
    return _PAGE.format(
        name=name,
        source=ast.get_docstring(known[node.name][1]) or "",
        python=python,
        meaning="\n\n".join(meaning),
        options="\n".join(options(line)),
        recipe=recipe.strip(),
    )


def pages() -> dict[str, str]:
    """The text of each page, by the algorithm's name."""
    known = classes()
    named = {name: node for node, _ in known.values() if (name := registered(node)) is not None}
    return {name: page(name, named[name], known) for name in sorted(named)}


def on_config(config: Any) -> Any:
    """A folded group of the guides, behind the page that compares them."""
    guides = next(group["Guides"] for group in config.nav if "Guides" in group)
    each = {"Each algorithm": [{name: f"algorithms/{name}.md"} for name in pages()]}
    guides.insert(guides.index("algorithms.md") + 1, each)
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"algorithms/{name}.md", content=text))
    return files
