"""`python -m verl`: the command line."""

from verl.cli.main import app

app(prog_name="verl")
