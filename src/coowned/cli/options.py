"""Options that mean the same on several verbs."""

from typing import Annotated

import typer

Delta = Annotated[
    float, typer.Option(metavar="D", help="Probability with which the promise may fail; far below 1 / users.")
]
Adjacency = Annotated[str, typer.Option(help="zero-out or replace; the other is shown beside it.")]
Seed = Annotated[int, typer.Option(help="Public seed that breaks ties: the same seed gives the same S.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
