"""The contribution certificate, counted on Spark: equal to that of one machine for the same graph and selection.

Nothing here is shared with the rounds: S is joined with the attribution and counted.
"""

import os
from typing import TYPE_CHECKING

import coowned
from coowned.attribution import digest as digests
from coowned.certificate import MOST_COPIES, ContributionCertificate, SelectionOrigin
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.selection.selector import Selector
from coowned.spark import functions as F
from coowned.spark.attribution import SparkGraph, sum_rows, working_on
from coowned.spark.user_bounds import bounds_of, count_tiers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def certify(
    data: "DataFrame | SparkGraph",
    selection: "DataFrame",
    *,
    selector: Selector | None = None,
    seed: int | None = None,
    upper_bound: int | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> ContributionCertificate:
    """Recounts a selection on its graph.

    Args:
      data: the graph, or the table, that it was selected from.
      selection: example_id, copies: a row for each selected example.
      selector, seed, upper_bound: where the selection came from and what was proven of its size, for the record;
        none can be recounted, but bounds of single users are held against what is found.

    Guarantees:
      - The certificate, digests and all, that `coowned.certify` makes on one machine.
        (test_certificate_is_the_local_one)
      - Unknown and duplicate ids are refused.   (test_foreign_selections_are_refused)

    Cost: a hash of every pair, a join of S with the examples, a count by user.
    """
    if not {"example_id", "copies"} <= set(getattr(selection, "columns", ())):
        raise InputError("selected must be a table with the columns example_id and copies")
    with working_on(data, checkpoint_dir) as (graph, checkpoints):
        selected = selection.select(F.col("example_id").cast("string").alias("text"), F.col("copies").cast("bigint"))
        rows, size, most = _count_rows(selected)
        text = F.col("id").cast("string").alias("text")
        joined = checkpoints.save(graph.examples.select(text, "users").join(selected, "text"), "chosen")
        if joined.count() != rows:
            stranger = selected.join(joined.select("text"), "text", "left_anti").limit(1).collect()
            named = repr(stranger[0][0]) if stranger else "one"
            raise CertificateMismatchError(
                f"example {named} of the selection is not in the data; check the data and the example_id"
            )
        copies = F.col("copies")
        without = joined.where(F.size("users") == 0).agg(F.sum(copies)).collect()[0][0] or 0
        levels = _levels(joined, graph.num_users)
        row = F.concat(F.lit("copies:"), copies.cast("string"), F.lit(":"), F.col("text"))
        selection_digest = digests.finish("selection", sum_rows(selected, row))
        bounds = bounds_of(selection) or getattr(selector, "contribution_bounds", None)
        certificate = ContributionCertificate(
            contribution_bound=max(len(levels) - 1, 0),
            size=size,
            num_distinct=rows,
            most_copies_of_one_example=most,
            num_copies_without_users=without,
            copies_per_user=levels,
            num_examples=graph.num_examples,
            num_users=graph.num_users,
            num_unprotected_users=graph.num_unprotected_users,
            columns_read=graph.columns_read,
            graph_digest=graph.digest,
            selection_digest=selection_digest,
            schedule=None,
            groups=None,
            origin=SelectionOrigin(
                selector={"name": "from-copies"} if selector is None else selector.settings(),
                seed=seed,
                upper_bound=upper_bound,
                proven_optimal=size == upper_bound,
                version=coowned.__version__,
            ),
            tiers=None if bounds is None else count_tiers(graph, joined, bounds, levels=max(len(levels), 1)),
        )
        checkpoints.clear()
    return certificate


def _count_rows(selected: "DataFrame") -> tuple[int, int, int]:
    """Returns the number of rows, of copies, and the most copies of one example."""
    copies = F.col("copies")
    wrong = F.count_if(F.col("text").isNull() | copies.isNull() | (copies < 1) | (copies >= 1 << 31))
    rows, bad, size, most = selected.agg(F.count(F.lit(1)), wrong, F.sum(copies), F.max(copies)).collect()[0]
    if bad:
        raise InputError(f"{bad} rows of the selection have no example_id, or copies outside [1, 2^31); write it again")
    repeated = selected.groupBy("text").count().where("count > 1").limit(1).collect()
    if repeated:
        raise InputError(f"the example_id {repeated[0][0]!r} is in several rows; put its copies in one row")
    return rows, size or 0, most or 0


def _levels(joined: "DataFrame", num_users: int) -> tuple[int, ...]:
    """Returns how many users are in 0, 1, … copies."""
    per_user = joined.select(F.explode("users").alias("user"), "copies").groupBy("user").agg(F.sum("copies").alias("n"))
    most = per_user.agg(F.max("n")).collect()[0][0] or 0
    if most > MOST_COPIES:
        raise UncertifiableError(f"a user is in more than {MOST_COPIES:,} copies; select with a contribution bound")
    if num_users == 0:
        return ()
    found = dict(map(tuple, per_user.groupBy("n").count().collect()))
    found[0] = num_users - sum(found.values())
    return tuple(found.get(level, 0) for level in range(most + 1))
