"""`verl export`: the trained model out of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
