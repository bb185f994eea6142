"""The `verl` command. A command imports what it needs when it runs, so that help comes at once."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from verl import __version__
from verl._base.visible import visible
from verl.cli.agent import app as agent
from verl.cli.doctor import doctor
from verl.cli.eval import evaluate
from verl.cli.generate import generate
from verl.cli.init import init
from verl.cli.tune import tune
from verl.errors import ConfigError, VerlError

if TYPE_CHECKING:
    from verl.config import Config

CONFIG_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130
_BEGAN = time.monotonic()


class _Commands(TyperGroup):
    """Commands whose expected failures are one message and an exit code, not a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # files have errors of their own: this is the output itself, such as a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in buffers goes nowhere
            typer.secho(f"error: {error.filename or 'standard output'}: {error.strerror or error}", fg="red", err=True)
            sys.exit(OTHER_ERROR)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:  # lines of a paragraph are one; those of examples stay
            command.help = re.sub(r"(?<=[^\n])\n(?=[^\n$])", " ", command.help)
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VerlError as error:
            if os.environ.get("LOG_LEVEL", "").upper() == "DEBUG":
                traceback.print_exc()
            typer.secho(visible(f"error: {error}"), fg="red", err=True)
            raise typer.Exit(CONFIG_ERROR if isinstance(error, ConfigError) else OTHER_ERROR) from None
        except KeyboardInterrupt:
            typer.secho("interrupted", fg="yellow", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]verl init DIR[/bold]",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models.

    LOG_LEVEL=DEBUG in the environment shows the detail, and the traceback of an error.
    """


@app.command()
def train(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE]", help="Settings in YAML; not needed where KEY=VALUE say all.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings that replace those of the file; a mapping is merged into the file's, KEY=null removes one.",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, even if this run is unfinished.")] = False,
    accept_edits: Annotated[
        bool, typer.Option("--accept-edits", help="Go on although files of your own code have changed; it is recorded.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print all settings and what would run; load no model.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="With --dry-run: predict the memory on such devices: H100-80GB, 8xA100, 2x8xH200."),
    ] = None,
) -> None:
    """Train a model, or go on with a run that was interrupted.

    The same command continues an unfinished run from its last checkpoint.
    When the last run is finished, it starts a new one.

    [bold]Examples[/bold]
    $ verl train examples/grpo_arithmetic.yaml
    $ verl train examples/grpo_arithmetic.yaml trainer.seed=1 algorithm.name=remax
    $ verl train examples/grpo_arithmetic.yaml 'data.train={task: chain_sum, size: 1000}' --dry-run
    $ verl train recipe.yaml --dry-run --device 8xH100-80GB
    $ verl train recipe.yaml data.train=prompts.jsonl reward.name=null reward.path=my_rewards.py:score --fresh
    $ verl train data.train_files=train.parquet data.train_batch_size=64 actor_rollout_ref.model.path=MODEL ...
    """
    from verl.config import load_config

    overrides = overrides or []
    is_setting = "=" in str(file) and not file.exists()
    config = load_config(None, [str(file), *overrides]) if is_setting else load_config(file, overrides)
    if device is not None and not dry_run:
        raise ConfigError("--device asks what a run would take of a device that may be elsewhere: give --dry-run too")
    if dry_run:
        _dry_run(config, device)
        return
    if "console" in config.trainer.loggers:  # a run in one line, before anything is loaded
        trainer = config.trainer
        count, unit = (trainer.total_epochs, "epoch") if trainer.total_epochs else (trainer.total_steps, "step")
        names = " and ".join(task.type for task in config.tasks) or config.algorithm.name or "the default algorithm"
        what = f"{count} {unit}{'s' * (count != 1)} of {names} on {config.actor_rollout_ref.model.path}"
        typer.echo(f"verl train {file}: {visible(what)}; loading")
    from verl._host.device import limit_library_memory

    limit_library_memory()
    from verl.run.train import train as run

    run(config, fresh=fresh, accept_edits=accept_edits, began=_BEGAN)


def _dry_run(config: Config, device: str | None) -> None:
    from verl.config import differences, to_yaml
    from verl.run.build import check_settings
    from verl.run.data import in_steps

    checked = check_settings(config)
    _show_plan(in_steps(config, checked.data))
    if device is not None:
        from verl.planner.hardware import Cluster
        from verl.run.memory import memory_on

        cluster = Cluster.parse(device if device[:1].isdigit() else f"1x{device}", option="--device")
        typer.echo("\n" + "\n".join(memory_on(config, [task.algorithm for task in checked.tasks], cluster).lines()))
    typer.echo("\n# Not the default:")
    for key, value, default in differences(config):
        typer.echo(f"{typer.style(key, bold=True)}: {visible(str(value))}  # {default}")
    typer.echo("\n# All settings:\n" + to_yaml(config))


def _show_plan(config: Config) -> None:
    from verl.cli.plan import plan

    for label, text in plan(config).items():
        typer.echo(f"{typer.style(f'{label:>14}', bold=True)}  {visible(text, '')}")


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings in YAML.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="MACHINESxDEVICESxKIND, such as 16x8xA100."),
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="Gbit/s between machines, per machine (default: as the vendor builds them).")
    ] = None,
    within: Annotated[
        float | None, typer.Option(help="Only placements whose rollout takes no more seconds than this.")
    ] = None,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="Show how throughput grows with the cluster, and the batch size that takes."),
    ] = False,
    efficiency: Annotated[
        str | None,
        typer.Option(help="Fractions of the data-sheet rates to assume: COMPUTE,MEMORY,NETWORK, such as 0.5,0.6,0.5."),
    ] = None,
) -> None:
    """Show what a run would do; with --cluster, find the best placement and parallel sizes on that cluster.

    Loads no model. The placement is printed ready to paste into FILE.

    [bold]Examples[/bold]
    $ verl plan recipe.yaml
    $ verl plan recipe.yaml --cluster 16x8xA100 --network 200
    $ verl plan recipe.yaml data.batch_size=4096 --cluster 128x8xH100 --scaling --within 60
    """
    from verl.cli.plan import cluster_of, plan_placement
    from verl.config import load_config

    config = load_config(file, overrides or ())
    if cluster is None:
        of_a_cluster = (network, within, efficiency)
        if scaling or any(option is not None for option in of_a_cluster):
            raise ConfigError("verl plan: these options are of a cluster: give --cluster too, such as 16x8xA100")
        _show_plan(config)
        return
    on = cluster_of(cluster, network, efficiency)
    for text in plan_placement(config, on, within=within, scaling=scaling):
        typer.echo(text)


@app.command()
def config(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page of Markdown.")] = False,
) -> None:
    """Print every setting with its default and meaning.

    [bold]Examples[/bold]
    $ verl config > all-settings.yaml
    $ verl config | grep rollout -A 15
    $ verl config --markdown > docs/config.md
    """
    from verl.config import commented_yaml
    from verl.config import markdown as as_markdown

    typer.echo(as_markdown() if markdown else commented_yaml(), nl=False)


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where the page of several runs goes.")] = Path("comparison.html"),
) -> None:
    """Write report.html of a run, finished or not: curves, completions before and after, settings.

    Several runs share one page with their results, their curves on the same axes with a band over seeds, their answers
    to one prompt side by side, and the settings that differ.

    [bold]Examples[/bold]
    $ verl report runs/latest
    $ verl report runs/grpo-* runs/rloo-* --out comparison.html
    """
    from verl.report.compare import write_comparison
    from verl.report.page import write_report

    typer.echo(write_report(run_dirs[0]) if len(run_dirs) == 1 else write_comparison(run_dirs, out))


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub name.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a model before training: size, precision, tokenizer, packed against plain forward.

    [bold]Examples[/bold]
    $ verl check models/SmolLM2-135M-Instruct
    $ verl check Qwen/Qwen2.5-0.5B-Instruct --dtype float32 --json
    """
    from rich.console import Console

    from verl._host.device import put
    from verl.models.check import check_model
    from verl.models.loading import load_model, load_tokenizer

    report = check_model(put(load_model(model, dtype=dtype)), load_tokenizer(model))
    if as_json:
        typer.echo(json.dumps(vars(report), indent=2))
    else:
        Console().print(report)
    if report.problems:
        raise typer.Exit(OTHER_ERROR)


@app.command()
def verify(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Directory of a checkpoint.", show_default=False)
    ],
) -> None:
    """Check a checkpoint: every file's checksum, every tensor, and the reloaded model's forward pass against the
    one noted when it was saved.

    [bold]Examples[/bold]
    $ verl verify runs/latest/checkpoints/step-000060
    """
    from verl.checkpoint.verify import verify as verify_checkpoint

    report = verify_checkpoint(checkpoint)
    typer.secho(visible(str(report)), fg="green" if report.ok else "red", err=not report.ok)
    if not report.ok:
        raise typer.Exit(OTHER_ERROR)


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or a run's directory: then its newest whole checkpoint.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.", show_default=False)],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer directory or hub name (else that of the model the run began with)."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters (LoRA) alone, as a directory that peft loads.")
    ] = False,
) -> None:
    """Write the trained model of a run as a plain Hugging Face directory: config, safetensors, tokenizer.

    The model is first checked as `verl verify` does: its outputs must be those noted when the checkpoint was saved.
    OUT loads in transformers and vLLM, and is a MODEL for `verl generate` and further training. Adapters are merged
    into the weights, unless --adapter is given.

    [bold]Examples[/bold]
    $ verl export runs/latest models/mine
    $ verl export runs/latest/checkpoints/step-000060 models/mine-60
    $ verl generate models/mine prompts.jsonl answers.jsonl --chat
    """
    from verl.run.export import export as write

    exported = write(checkpoint, out, tokenizer, adapter=adapter)
    typer.echo(f"step {exported.step} of {exported.path}", err=True)
    typer.echo(out)


app.command()(init)
app.command()(doctor)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(tune)
app.add_typer(agent, name="agent")
