"""What a plan asks of a graph, answered on Spark: counts, and the sizes of selections."""

import dataclasses
from typing import TYPE_CHECKING

from coowned.certificate import ContributionCertificate
from coowned.selection.selector import Selector
from coowned.spark import functions as F
from coowned.spark.attribution import SparkGraph
from coowned.spark.certificate import certify
from coowned.spark.selection import choose

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparkSelection:
    """An S on Spark, recounted."""

    table: "DataFrame"
    certificate: ContributionCertificate

    @property
    def size(self) -> int:
        return self.certificate.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparkPopulation:
    """A graph on Spark, for `coowned.plan`.

    Guarantees:
      - DP-SGD's rows are those of one machine.   (test_rows_are_the_local_ones)
    """

    graph: SparkGraph

    @property
    def num_examples(self) -> int:
        return self.graph.num_examples

    @property
    def num_pairs(self) -> int:
        return self.graph.num_pairs

    @property
    def num_attributed_users(self) -> int:
        return self.graph.num_users

    @property
    def num_examples_without_users(self) -> int:
        return self.graph.counts[2]

    def quantile_of_examples_per_user(self, share: float) -> float:
        counts = self.graph.pairs.groupBy("user").count()
        return float(counts.agg(F.percentile("count", F.lit(share))).collect()[0][0] or 0.0)

    def select(self, selector: Selector, seed: int) -> SparkSelection:
        chosen = choose(self.graph, selector, seed=seed)
        certificate = certify(self.graph, chosen.table, selector=selector, seed=seed, upper_bound=chosen.upper_bound)
        return SparkSelection(table=chosen.table, certificate=certificate)

    def count(self, selected: SparkSelection) -> tuple[ContributionCertificate, float]:
        text = F.col("id").cast("string").alias("text")
        sizes = self.graph.examples.select(text, F.size("users").alias("users"))
        copies = selected.table.select(F.col("example_id").cast("string").alias("text"), "copies")
        total = sizes.join(copies, "text").agg(F.sum(F.col("users") * F.col("copies").cast("bigint"))).collect()[0][0]
        return selected.certificate, (total or 0) / max(1, selected.size)

    def heavy_users_advice(self, contribution_bound: int) -> str | None:
        return self.graph.heavy_users().advice(contribution_bound)
