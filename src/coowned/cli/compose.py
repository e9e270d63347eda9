"""`coowned compose`: the joint guarantee of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from coowned.cli import show
from coowned.cli.options import AllowLargeDelta, Delta, Json


def run(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of finished runs on the same people's data.")
    ],
    delta: Delta,
    allow_large_delta: AllowLargeDelta = False,
    json: Json = False,
) -> None:
    """Composes runs on the same attribution graph: the epsilon of a person whose data were in all of them.

    Every run counts in full; a sweep, whose models share their batches, counts with all its models. Include tuning
    runs whose results influenced a decision, even if their models were not published.

    Example:

        coowned compose RUN1 RUN2 --delta 1e-6
    """
    from coowned.accounting.guarantee import compose
    from coowned.runs.stored_run import read_claim

    claims = [read_claim(folder) for folder in folders]
    with show.progress("composing"):
        composed = compose([claim.guarantee for claim in claims], delta=delta, allow_large_delta=allow_large_delta)
    if json:
        show.line(composed.to_json())
        return
    show.table(
        f"each run alone, at its own delta (unit: {composed.unit}; bound k; adjacency: {composed.adjacency})",
        ("run", "models", "k", "epsilon", "delta"),
        [
            (str(folder), claim.num_models, made.contribution_bound, made.shown_epsilon, f"{made.delta:.12g}")
            for folder, claim, made in zip(folders, claims, composed.members, strict=True)
        ],
    )
    show.line()
    show.line(composed.statement())
