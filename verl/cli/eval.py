"""`verl eval`: how good a model is at a task, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from verl.errors import ConfigError


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, hub name, run or checkpoint.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Problems: JSONL, Parquet, {task: NAME}, or a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As of `verl train`.")] = None,
    reward: Annotated[str | None, typer.Option(help="FILE.py:FUNCTION, or a name (else as DATA says).")] = None,
    against: Annotated[str | None, typer.Option(metavar="BEFORE", help="A model to compare MODEL with.")] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Responses to a problem; above 1: pass@k.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: 0, or 1 where -n is above 1.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first problems only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure a model on problems: accuracy and reward with a 95 % interval, and pass@k.

    DATA and reward are what training takes; a recipe (YAML) names its data.eval and its reward. Accuracy is the share
    of right answers, by the task's own verifier, or where every reward is 0 or 1. With --against, both
    models answer the same problems, so that their difficulty cancels.

    [bold]Examples[/bold]
    $ verl eval runs/latest recipe.yaml --against models/SmolLM2-135M-Instruct
    $ verl eval MODEL held_out.jsonl --reward rewards.py:correct -n 8
    $ verl eval MODEL '{task: chain_sum, size: 200}' data.chat=true --json
    $ verl eval MODEL gsm8k.parquet --reward math actor_rollout_ref.rollout.max_new_tokens=512
    """
    from verl._host.device import limit_library_memory
    from verl.config import load_config
    from verl.run import evaluate as run

    recipe = Path(data) if data.endswith((".yaml", ".yml")) else None
    settings = [] if recipe else [f"data.eval={data}"]
    if reward is None and data.lstrip().startswith("{"):
        reward = "task"
    if reward is not None:
        source, other = ("path", "name") if ".py:" in reward else ("name", "path")
        settings += [f"reward.{source}={reward}", f"reward.{other}=null"]
    if n is not None:
        settings.append(f"trainer.eval_n={n}")
    if temperature is None and (n or 1) > 1:
        temperature = 1.0
    if temperature is not None:
        settings.append(f"trainer.eval_temperature={temperature}")
    config = load_config(recipe, [f"actor_rollout_ref.model.path={model}", *settings, *(overrides or [])])
    if config.trainer.eval_n > 1 and not config.trainer.eval_temperature:
        raise ConfigError("-n above 1 with temperature 0: all responses to a problem would be one: raise --temperature")
    limit_library_memory()
    models = [model] if against is None else [against, model]
    result = run.evaluate_models(config, models, limit=limit, tell=lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)


def _print(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from verl.report.page import value_text

    models, gains = result["models"], result["gains"]
    columns = ("before", "after", "gain") if len(models) == 2 else ("result",)
    table = Table("", *columns, title=f"{models[0]['problems']} problems, 95 % intervals")
    for name in gains or models[0]["metrics"]:
        kind = "reward" if name == "reward" else "accuracy"  # pass@k is a share, too
        cells = [value_text(kind, **model["metrics"][name]) for model in models]
        if gain := gains.get(name):
            cells.append(value_text(kind, gain["value"], gain["low"], gain["high"], "+"))
        table.add_row(name, *cells)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for when, model in zip(columns, models, strict=False):
        left_out = f" ({model['abstained']} responses without a score)" if model["abstained"] else ""
        console.print(f"{when}: {model['model']}{left_out}", markup=False)
