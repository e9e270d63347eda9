"""The 1.19 million papers of arXiv on Spark: the same S and certificate as on one machine.

    python -m benchmarks spark

Needs the extra `spark` and Java; names go through the same key rules on both sides.
"""

from pathlib import Path

import numpy as np

import coowned as co
from benchmarks.timing import Figure, timed
from coowned.attribution.sources import DataSource

ARXIV = Path(__file__).parents[2] / "shared" / "data" / "arxiv_hypergraph.parquet"
BOUND = 3


def run() -> list[Figure]:
    from coowned.spark import certify, select, session
    from coowned.spark.sources import attribute_source

    source = DataSource(path=ARXIV, users=("users",), example_id="example_id")
    examples = source.read()
    selector = co.Greedy(contribution_bound=BOUND)
    local_seconds, local = timed(lambda: selector.select(examples.graph))
    expected = co.certify(examples.graph, local)
    left: list[str] = []
    with session() as spark:
        read_seconds, graph = timed(lambda: attribute_source(spark, source))
        seconds, found = timed(
            lambda: select(graph, selector, residue=0, progress=lambda done, message: left.append(message))
        )
        certify_seconds, certificate = timed(lambda: certify(graph, found, selector=selector, seed=0))
        table = found.toArrow()
        chosen = set(table["example_id"].to_pylist())
        once = set(table["copies"].to_pylist()) == {1}
        graph.release()
    rows_chosen = np.flatnonzero(local.copies)
    same = once and chosen == set(examples.graph.ids_of(rows_chosen).to_pylist())
    rounds = sum(message.startswith("round") for message in left)
    title = f"arXiv, {examples.graph.num_pairs:,} pairs, k = {BOUND}"
    return [
        Figure(f"{title}: S is the local one", float(same), "", "= 1"),
        Figure(
            f"{title}: the certificate is the local one",
            float(certificate.to_json() == expected.to_json()),
            "",
            "= 1",
        ),
        Figure(f"{title}: rounds", rounds, "", "<= 10"),
        Figure(f"{title}: reading and attributing on Spark", read_seconds, "s"),
        Figure(f"{title}: selecting on Spark, by rounds alone", seconds, "s"),
        Figure(f"{title}: certifying on Spark", certify_seconds, "s"),
        Figure(f"{title}: selecting on one machine", local_seconds, "s"),
    ]
