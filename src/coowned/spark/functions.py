"""`pyspark.sql.functions`, imported when one is first used: this package can be imported where Spark is missing."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from pyspark.sql import functions

    return getattr(functions, name)
