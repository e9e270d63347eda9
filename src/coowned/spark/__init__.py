"""Selection and certification at cluster size, with the answers of one machine; needs the extra `coowned[spark]`."""

from coowned.spark.attribution import SparkGraph, attribute
from coowned.spark.certificate import certify
from coowned.spark.selection import select
from coowned.spark.selection_files import write_selection
from coowned.spark.session import session

__all__ = ["SparkGraph", "attribute", "certify", "select", "session", "write_selection"]
