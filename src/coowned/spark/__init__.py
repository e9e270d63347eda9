"""Selection and certification on Spark, with the same results as on one machine; needs the extra `coowned[spark]`."""

from coowned.spark.attribution import SparkGraph, attribute
from coowned.spark.certificate import certify
from coowned.spark.selection import select
from coowned.spark.selection_files import write_selection
from coowned.spark.session import session
from coowned.spark.shards import write_shards

__all__ = ["SparkGraph", "attribute", "certify", "select", "session", "write_selection", "write_shards"]
