"""`echo-explore calibrate`: fit the models to measurements of your own."""

import typer

app = typer.Typer(help="Fit the models to measurements of your own.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Fit the models to measurements of your own."""
