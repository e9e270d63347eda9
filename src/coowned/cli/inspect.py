"""`coowned inspect`: statistics of the data before anything is selected."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coowned.cli import show
from coowned.cli.engine import Engine, runs_on_engines
from coowned.cli.options import Json, reads_data
from coowned.progress import counted

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource
    from coowned.attribution.statistics import GraphStatistics


@runs_on_engines
@reads_data
def run(
    source: "DataSource",
    engine: Engine,
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

        coowned inspect hdfs://head/pairs.parquet --user user_id --example-id example_id --engine spark \\
            --master spark://head:7077 --checkpoint-dir hdfs://head/tmp

        coowned inspect slack-export.zip --attribute-to channel

        coowned inspect mail.db --query "SELECT id, sender, recipients FROM mail ORDER BY id" \\
            --example-id id --users sender,recipients --separator ";"
    """
    engine.refuse_addresses(str(source.path))
    found = _on_spark(source, engine) if engine.on_spark else _locally(source)
    statistics = found.statistics
    names = found.heaviest if show_keys else [f"#{rank}" for rank in range(1, len(found.heaviest) + 1)]
    if json:
        fields = statistics.to_dict()
        fields["heaviest_users"] = [
            {"user": name, "examples": held} for name, (_, held) in zip(names, statistics.heaviest_users, strict=True)
        ]
        fields["columns_read"] = list(found.columns_read)
        show.as_json({**fields, "digest": found.digest, "notes": found.notes})
        return
    _print(statistics, names, found.notes)
    if found.advice:
        show.line(found.advice)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inspected:
    """The findings of an engine."""

    statistics: "GraphStatistics"
    heaviest: list[Any]  # keys of the heaviest users
    columns_read: tuple[str, ...]
    digest: str
    notes: dict[str, int]
    advice: str | None


def _locally(source: "DataSource") -> _Inspected:
    from coowned.attribution.statistics import GraphStatistics, heavy_users_advice

    with show.progress("reading") as progress:
        examples = source.read(progress, content=False)
    statistics = GraphStatistics.of(examples.graph)
    return _Inspected(
        statistics=statistics,
        heaviest=[examples.user_keys[user].as_py() for user, _ in statistics.heaviest_users],
        columns_read=examples.graph.columns_read,
        digest=examples.graph.digest,
        notes=dict(examples.notes),
        advice=heavy_users_advice(examples.graph, max(statistics.blocked)),
    )


def _on_spark(source: "DataSource", engine: Engine) -> _Inspected:
    from coowned.spark.session import check_machine
    from coowned.spark.sources import attribute_source, check_source

    check_source(source)
    check_machine()
    with engine.session(source.path, "inspecting") as (spark, progress):
        progress(0.1, "reading")
        graph = attribute_source(spark, source)
        progress(0.5, "counting")
        statistics = graph.statistics()
        found = _Inspected(
            statistics=statistics,
            heaviest=[user for user, _ in graph.heaviest],
            columns_read=graph.columns_read,
            digest=graph.digest,
            notes={},
            advice=graph.heavy_users().advice(max(statistics.blocked)),
        )
        graph.release()
    return found


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
            *((name, number, "", "", "") for name, number in _components(statistics)),
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


def _components(statistics: "GraphStatistics") -> list[tuple[str, int]]:
    if statistics.num_components is None:
        return []
    largest = (statistics.largest_component_users or 0, statistics.largest_component_examples or 0)
    return [
        ("components", statistics.num_components),
        ("  users in the largest", largest[0]),
        ("  examples in the largest", largest[1]),
    ]


def _spread(statistics: "GraphStatistics", name: str) -> tuple[float, float, int]:
    return tuple(getattr(statistics, f"{kind}_{name}") for kind in ("mean", "median", "max"))  # type: ignore[return-value]
