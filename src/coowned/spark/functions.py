"""A lazy `pyspark.sql.functions`, so that this package can be imported where Spark is missing."""

from typing import Any

from coowned.errors import MissingExtraError, require


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        require("spark", "coowned.spark")
    except MissingExtraError as error:
        raise AttributeError(str(error)) from None  # what a module raises for a name: hasattr and doctest ask for some
    from pyspark.sql import functions

    return getattr(functions, name)
