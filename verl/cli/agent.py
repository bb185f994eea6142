"""`verl agent check`: what would be trained of an agent, before anything is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl._base.visible import visible
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.run.agent import CheckedEpisode

app = typer.Typer(no_args_is_help=True, help="Agents: programs that know the address of an endpoint; environments.")


@app.command()
def check(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="A script; FILE.py:NAME of an agent's function, a Gateway, an environment's class or an episode; or a "
            "command.",
            show_default=False,
        ),
    ],
    model: Annotated[str, typer.Option(help="Model directory or hub name.")] = "HuggingFaceTB/SmolLM2-135M-Instruct",
    prompts: Annotated[str | None, typer.Option(help="A file of rows, of which the first ones are taken.")] = None,
    row: Annotated[str | None, typer.Option(help="One row as JSON, in the place of a file.")] = None,
    episodes: Annotated[int, typer.Option("-n", min=1, max=64, help="Episodes: one a row.")] = 1,
    chat_template: Annotated[str | None, typer.Option(help="In the place of the model's: hermes, or a file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line, an episode each.")] = False,
) -> None:
    """Run an agent or an environment against a model, and show what would be trained. Nothing is.

    Each conversation is shown as its tokens are: [bold]lines that begin with +[/bold] are what the policy wrote and
    training would learn from, the others are read. Below are the episode's reward, which calls are left out and why,
    and warnings: calls that do not continue an earlier one, replies that look like tool calls but do not parse, nothing
    to train. A model whose chat template does not show tools is an error; --chat-template hermes is one for any model.

    Exit code 0: every episode would be trained; 1: one would be left out, or has nothing to train; 2: a wrong setting.

    [bold]Examples[/bold]
    $ verl agent check my_agent.py --prompts tasks.jsonl -n 4
    $ verl agent check my_agent.py:agent --row '{"prompt": "What is 2 + 2?"}' --chat-template hermes
    $ verl agent check game.py:Game --model models/SmolLM2-135M-Instruct --prompts games.jsonl --json
    """
    from verl.data.prompts import load_prompts
    from verl.run.agent import check_agent, episode_of

    if (prompts is None) == (row is None):
        raise ConfigError("an agent works on rows: give --prompts FILE or --row '{\"prompt\": ...}', one of them")
    data = load_prompts([_row(row)] * episodes if row is not None else prompts)
    rows = list(data.batch.take(range(min(episodes, len(data)))).rows())
    episode = episode_of(script, chat_template)
    done = check_agent(episode, model, rows, max_new_tokens=max_new_tokens, temperature=temperature)
    for each in done:
        if as_json:
            typer.echo(json.dumps(asdict(each), ensure_ascii=False))
        else:
            _show(each)
    if not all(each.trained for each in done):
        raise typer.Exit(1)  # an episode would not be trained


def _row(text: str | None) -> dict[str, Any]:
    try:
        row = json.loads(text or "")
    except ValueError as error:
        raise ConfigError(f"--row is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError('--row is an object of columns, such as {"prompt": "What is 2 + 2?"}')
    return row


def _show(episode: CheckedEpisode) -> None:
    typer.secho(f"episode {episode.row}", bold=True)
    for number, parts in enumerate(episode.conversations, start=1):
        typer.secho(f"conversation {number} of {len(episode.conversations)}", bold=True)
        for part in parts:
            for line in part["text"].rstrip("\n").split("\n"):
                mark, color = ("+ ", "green") if part["trained"] else ("  ", None)
                typer.secho(visible(mark + line), fg=color)
    if episode.left_out is not None:
        typer.secho(visible(f"left out: {episode.left_out}"), fg="red")
        return
    trained = sum(part["tokens"] for parts in episode.conversations for part in parts if part["trained"])
    typer.echo(f"reward {episode.reward}, {trained} tokens trained")
    if episode.calls is not None:
        others = f", of other models: {episode.other_calls}" if episode.other_calls else ""
        typer.echo(f"calls {episode.calls}, left out: {episode.calls_left_out or 'none'}{others}")
    for warning in episode.warnings:
        typer.secho(visible(f"warning: {warning}"), fg="yellow")
