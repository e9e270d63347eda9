"""`coowned inspect`: what the data look like before anything is selected."""

from typing import TYPE_CHECKING, Annotated

import typer

from coowned.cli import show
from coowned.cli.options import Json, reads_data
from coowned.progress import counted

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource
    from coowned.attribution.statistics import GraphStatistics


@reads_data
def run(
    source: "DataSource",
    show_keys: Annotated[
        bool, typer.Option("--show-keys", help="Show the keys of the heaviest users instead of their ranks.")
    ] = False,
    json: Json = False,
) -> None:
    """Shows counts, users per example, examples per user, and how many examples the heaviest users block.

    Only ids and users are used, never content.

    Examples:

        coowned inspect mail.mbox

        coowned inspect papers.parquet --users authors --example-id id

        coowned inspect messages.csv --users sender,to,cc --separator ";" --json

        coowned inspect slack-export.zip --attribute-to channel

        coowned inspect mail.db --query "SELECT id, sender, recipients FROM mail ORDER BY id" \\
            --example-id id --users sender,recipients --separator ";"
    """
    from coowned.attribution.statistics import GraphStatistics, heavy_users_advice

    with show.progress("reading") as progress:
        examples = source.read(progress)
    statistics = GraphStatistics.of(examples.graph)
    names = [f"#{rank}" for rank in range(1, len(statistics.heaviest_users) + 1)]
    if show_keys:
        names = [examples.user_keys[user].as_py() for user, _ in statistics.heaviest_users]
    if json:
        fields = statistics.to_dict()
        fields["heaviest_users"] = [
            {"user": name, "examples": held} for name, (_, held) in zip(names, statistics.heaviest_users, strict=True)
        ]
        fields["columns_read"] = list(examples.graph.columns_read)
        show.as_json({**fields, "digest": examples.graph.digest, "notes": dict(examples.notes)})
        return
    _print(statistics, names, dict(examples.notes))
    if advice := heavy_users_advice(examples.graph, max(statistics.blocked)):
        show.line(advice)


def _print(statistics: "GraphStatistics", names: list[str], notes: dict[str, int]) -> None:
    from coowned.attribution.statistics import class_name

    show.table(
        "Counts",
        ("", "number", "mean", "median", "most"),
        [
            ("examples", statistics.num_examples, "", "", ""),
            ("  users per example", "", *_spread(statistics, "users_per_example")),
            ("  without a user", statistics.num_examples_without_users, "", "", ""),
            ("users", statistics.num_users, "", "", ""),
            ("  examples per user", "", *_spread(statistics, "examples_per_user")),
            ("  not protected", statistics.num_unprotected_users, "", "", ""),
            ("pairs", statistics.num_pairs, "", "", ""),
            ("components", statistics.num_components, "", "", ""),
            ("  users in the largest", statistics.largest_component_users, "", "", ""),
            ("  examples in the largest", statistics.largest_component_examples, "", "", ""),
        ],
    )
    for title, histogram, unit in (
        ("Users per example", statistics.users_per_example_histogram, "examples"),
        ("Examples per user", statistics.examples_per_user_histogram, "users"),
    ):
        show.line()
        most = max((held for _, held in histogram), default=1)
        rows = [(class_name(begin), held, "█" * max(1, round(30 * held / most))) for begin, held in histogram]
        show.table(title, ("", unit, ""), rows, left=(0, 2))
    show.line()
    rows = [
        (name, held, f"{100 * held / statistics.num_examples:.1f}%")
        for name, (_, held) in zip(names, statistics.heaviest_users, strict=True)
    ]
    show.table("Heaviest users", ("", "examples", "share"), rows)
    show.line()
    for bound, blocked in statistics.blocked.items():
        share = blocked / max(1, statistics.num_examples)
        users = "user alone blocks" if len(names) == 1 else f"{len(names)} users alone block"
        show.line(
            f"At a contribution bound of {bound}, the heaviest {users} {counted(blocked, 'example')} ({share:.1%})."
        )
    for name, value in notes.items():
        show.line(f"{name.replace('_', ' ')}: {value:,}")


def _spread(statistics: "GraphStatistics", name: str) -> tuple[float, float, int]:
    return tuple(getattr(statistics, f"{kind}_{name}") for kind in ("mean", "median", "max"))  # type: ignore[return-value]
