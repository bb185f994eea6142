"""`verl tune`: the best values of some settings, by trials."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from verl.errors import VerlError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def tune(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings in YAML.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory of the study.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="LOW..HIGH, LOW..HIGH:log or A,B,C; integers if both ends are."),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="A name in metrics.jsonl: reward/mean, or eval/accuracy with data.eval.")
    ] = "reward/mean",
    last: Annotated[int, typer.Option(min=1, help="A trial's value is the mean of its last so many records.")] = 1,
    direction: Annotated[Literal["maximize", "minimize"], typer.Option(help="Which values are better.")] = "maximize",
    trials: Annotated[int, typer.Option(min=1, help="How many trials in all.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search; of training: trainer.seed.")] = 0,
    prune: Annotated[
        bool, typer.Option("--prune", help="Stop a trial that is below the median of the others at its step.")
    ] = False,
) -> None:
    """Search for the best values of settings: each trial is a run of FILE, and Optuna proposes the next.

    Any key can be searched; values that a run would refuse are refused at once. If a trial crashes or is killed, only
    that trial is lost. The same command continues an unfinished study, its interrupted run included; a larger --trials
    continues a finished one. A space of at most --trials combinations is searched whole. The directory gets the runs,
    best.yaml (for verl train) and report.html.

    [bold]Examples[/bold]
    $ verl tune recipe.yaml --search actor_rollout_ref.actor.optim.lr=1e-6..1e-4:log --out runs/tune
    $ verl tune recipe.yaml trainer.total_steps=30 --search actor_rollout_ref.rollout.n=4..16 --last 5 --prune --out DIR
    $ verl tune recipe.yaml --search algorithm.name=grpo,rloo --metric eval/accuracy --out runs/names
    """
    from verl.tune.space import parse
    from verl.tune.study import Search, ended, rows, tune, write_results

    searches = tuple(search or ())
    wanted = Search(file, tuple(overrides or ()), parse(searches), metric, direction, trials, seed, out, prune, last)
    # SIGTERM lets the running trial save, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    wanted.check()
    typer.echo(f"searched: {', '.join(searches)}")
    for new, study in enumerate(tune(wanted)):
        done = ended(study)
        if new:
            _say(done[-1], metric)
        elif done:
            typer.echo(f"{len(done)} trials were there already")
        best, page = write_results(wanted, study)
    from rich.console import Console
    from rich.table import Table

    headers, *lines = rows(wanted, study)
    table = Table(*headers, title=f"{direction} {metric}")
    for line in lines:
        table.add_row(*line)
    Console(soft_wrap=True, markup=False, emoji=False, highlight=False).print(table)
    if best is None:
        reason = done[0].user_attrs.get("reason")
        raise VerlError(f"no trial finished; trial {done[0].number}: {reason} (the logs are in {out})")
    typer.echo(f"report: {page}\nthe best settings: verl train {best}")


def _say(trial: FrozenTrial, metric: str) -> None:
    from verl.tune.study import STATES, short, shown

    values = " ".join(f"{key}={short(value)}" for key, value in trial.params.items())
    state, reason = STATES[trial.state.name], trial.user_attrs.get("reason")
    if (same := trial.user_attrs.get("as")) is not None:
        reason = f"{metric} {shown(trial)}, as trial {same}: the same values"
    outcome = f"{'' if state == 'finished' else f'{state}: '}{reason or f'{metric} {shown(trial)}'}"
    typer.secho(f"trial {trial.number}: {values}  {outcome}", fg="red" if state == "failed" else None)
