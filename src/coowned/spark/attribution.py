"""Attribution of Spark tables by the same rules as on one machine."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from coowned.attribution import digest as digests
from coowned.attribution.examples import read_aliases, refuse_unknown_keys
from coowned.attribution.identifiers import Location
from coowned.attribution.options import DataOptions
from coowned.attribution.statistics import MOST_LISTED, GraphStatistics, HeavyUsers, figures_of
from coowned.attribution.tables import attribute_table, table_options
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError
from coowned.selection.shards import SPLIT_SEED, split_ends
from coowned.spark import functions as F
from coowned.spark.checkpoints import Checkpoints, running_session
from coowned.spark.executors import check_python
from coowned.spark.session import use_this_interpreter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_ROWS_AT_ONCE = 1 << 15


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparkGraph:
    """The attribution graph as a table: one row per example, with its id and its users.

    Made by `attribute`. Nothing of it is ever collected to the driver but counts.

    Guarantees:
      - `digest` is that of the `AttributionGraph` of the same data.   (test_certificate_is_the_local_one)
    """

    # Columns: id (bigint or string), users (array of bigint or string, no duplicates).
    examples: "DataFrame" = dataclasses.field(repr=False)
    id_type: "DataType"  # the type of the ids in the input, which results have too
    columns_read: tuple[str, ...]  # as in `AttributionGraph`
    num_unprotected_users: int
    checkpoints: Checkpoints = dataclasses.field(repr=False)
    whole: "SparkGraph | None" = dataclasses.field(default=None, repr=False)  # whose train split this is
    splits: tuple[float, ...] | None = None

    @functools.cached_property
    def pairs(self) -> "DataFrame":
        """A table with columns id, user and one row per pair."""
        return self.examples.select("id", F.explode("users").alias("user"))

    @functools.cached_property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of examples, of pairs, and of examples without users."""
        size = F.size("users")
        row = self.examples.agg(F.count(F.lit(1)), F.sum(size.cast("bigint")), F.count_if(size == 0)).collect()[0]
        return row[0], row[1] or 0, row[2]

    @property
    def num_examples(self) -> int:
        return self.counts[0]

    @property
    def num_pairs(self) -> int:
        return self.counts[1]

    @functools.cached_property
    def num_users(self) -> int:
        """The number of users with at least one example; others do not occur in a table of pairs."""
        return self.pairs.select("user").distinct().count() if self.whole is None else self.whole.num_users

    @functools.cached_property
    def digest(self) -> str:
        """The same digest as `AttributionGraph.digest` for the same data."""
        return digests.finish("graph", self.digest_sums(self.examples))

    def digest_sums(self, examples: "DataFrame") -> digests.RowSums:
        """Returns what some examples of this graph add to its digest."""
        keys = F.array_sort(F.transform("users", lambda user: user.cast("string")))  # strings sort by their bytes
        lists = F.concat(F.array(F.col("id").cast("string")), keys)
        texts = F.transform(lists, lambda text: F.concat(F.octet_length(text).cast("string"), F.lit(":"), text))
        row = F.concat(F.lit("example:"), F.array_join(texts, ""))
        return sum_rows(examples, row)

    def train_split(self, splits: Sequence[float]) -> "SparkGraph":
        """Returns the graph of the train split of these shares, as training makes it; users and files are shared.

        Guarantees:
          - The split of one machine.   (test_the_verdict_is_the_local_one)
        """
        end = split_ends(splits)[0] - (1 << 63)  # of the hashes as signed numbers, in the order of unsigned ones
        hashed = F.xxhash64(F.lit(SPLIT_SEED).cast("bigint"), F.col("id").cast("string"))
        examples = self.examples.where(hashed.bitwiseXOR(F.lit(-(1 << 63))) < F.lit(end))
        return dataclasses.replace(self, examples=examples, whole=self, splits=tuple(map(float, splits)))

    @functools.cached_property
    def heaviest(self) -> list[tuple[Any, int]]:
        """The (user, examples) of the heaviest users; of equally heavy ones those whose keys come first."""
        counts = self.pairs.groupBy("user").count().orderBy(F.desc("count"), "user").limit(MOST_LISTED)
        return [(row["user"], row["count"]) for row in counts.collect()]

    def heavy_users(self) -> HeavyUsers:
        """Returns the heaviest users and their cost."""
        listed = (F.when(F.array_contains("users", user), rank) for rank, (user, _) in enumerate(self.heaviest))
        first = F.coalesce(*listed, F.lit(len(self.heaviest)))
        added = dict(map(tuple, self.examples.groupBy(first).count().collect()))
        return HeavyUsers(
            num_examples=self.num_examples,
            held=np.array([held for _, held in self.heaviest], dtype=np.int64),
            added=np.array([added.get(rank, 0) for rank in range(len(self.heaviest))], dtype=np.int64),
        )

    def statistics(self) -> GraphStatistics:
        """Returns the figures of `coowned inspect` without components, which are not counted; users are ranks."""
        per_user = self.pairs.groupBy("user").count().select(F.col("count").alias("value"))
        figures: dict[str, Any] = {}
        for name, counts in (
            ("users_per_example", self.examples.select(F.size("users").alias("value"))),
            ("examples_per_user", per_user),
        ):
            found = sorted(map(tuple, counts.groupBy("value").count().collect()))
            values, times = np.array(found, dtype=np.int64).reshape(-1, 2).T
            figures |= figures_of(name, values, times)
        return GraphStatistics(
            num_examples=self.num_examples,
            num_users=self.num_users,
            num_pairs=self.num_pairs,
            num_unprotected_users=self.num_unprotected_users,
            num_examples_without_users=self.counts[2],
            num_users_without_examples=0,
            heaviest_users=[(rank, held) for rank, (_, held) in enumerate(self.heaviest)],
            num_components=None,
            largest_component_users=None,
            largest_component_examples=None,
            blocked=self.heavy_users().blocked_by_bound(),
            **figures,
        )

    def release(self) -> None:
        """Removes the graph's files; neither it nor anything lazily derived from it can be used afterwards."""
        self.checkpoints.clear()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """The settings that executors need to attribute rows."""

    options: DataOptions
    rules: UserKeyRules
    aliases: Aliases | None
    types: dict[str, pa.DataType]

    @property
    def example_id(self) -> str:
        return self.options.example_id or ""

    @property
    def names(self) -> list[str]:
        return self.options.user_columns()


class Columns(TypedDict, total=False):
    """The columns of a table, and how to read them."""

    example_id: str  # "example_id" by default
    separator: str | None
    addresses: bool | None


def attribute(
    data: "DataFrame",
    users: str | Sequence[str] | None = None,
    user: str | None = None,
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    unprotected: Iterable[Any] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    **columns: Unpack[Columns],
) -> SparkGraph:
    """Builds the graph of a Spark table, one example per row, or one (example, user) pair per row with `user=`.

    Arguments are those of `from_table`, and so are the keys: the rules run as the same Python code on the executors,
    which then need this package. Exact rules (`UserKeyRules.exact()`), and integers as users, need no Python
    there. Rows with the same id are one example with the users of all of them, as on one machine. The difference: ids
    are never row numbers, since a table on a cluster has no order.

    Args:
      data: any Spark table; without `users` or `user`, its column `users` or else `user_id` is used.
      unprotected: keys of users to exclude, as `AttributedExamples.without_users` does; the list must fit the driver.
      checkpoint_dir: where the graph and the rounds of a selection are kept; the session's checkpoint directory by
        default, for a local master a temporary folder.
      columns: example_id, separator and addresses.

    Guarantees:
      - The same ids, keys and pairs as on one machine.      (test_keys_are_the_local_ones)
      - Copies of an example are one, with the users of all. (test_copies_of_an_example_are_one)
      - Bad rows are refused with the local sentences.       (test_bad_rows_are_refused)
    """
    spark = running_session(data)
    if users is None and user is None and "users" not in data.columns and "user_id" in data.columns:
        user = "user_id"
    given: dict[str, Any] = {"example_id": "example_id", "separator": None, "addresses": None, **columns}
    options, example_id = table_options(users, user, **given), given["example_id"]
    rules = user_keys or UserKeyRules()
    types = _checked_types(data, options)
    reading = _Reading(options=options, rules=rules, aliases=read_aliases(aliases), types=types)
    rows = _by_sql(data, reading) if _needs_no_python(reading) else _by_python(data, reading)
    if user is not None:
        rows = _merge_copies(rows, example_id)
    checkpoints = Checkpoints(spark, checkpoint_dir)
    try:
        examples = checkpoints.save(rows, "attributed")
        _refuse_problems(examples)
        if user is None and not examples.groupBy("id").count().where("count > 1").isEmpty():
            examples = checkpoints.save(_merge_copies(examples, example_id), "merged")
            checkpoints.remove("attributed")
            _refuse_problems(examples)
        examples, gone = _without(examples.drop("problem"), list(unprotected), rules, checkpoints)
    except BaseException:
        checkpoints.clear()
        raise
    return SparkGraph(
        examples=examples,
        id_type=data.schema[example_id].dataType,
        columns_read=(example_id, *options.user_columns()),
        num_unprotected_users=gone,
        checkpoints=checkpoints,
    )


def sum_rows(table: "DataFrame", text: "Column") -> digests.RowSums:
    """Computes the sums of `coowned.attribution.digest`, of one text per row.

    A decimal of 38 digits holds the sum of 10^18 lanes of 64 bits.
    """
    hashed = table.select(F.sha2(text, 256).alias("hash"))  # 64 hexadecimal digits
    lanes = [F.conv(F.substring("hash", 1 + 16 * lane, 16), 16, 10).cast("decimal(20, 0)") for lane in range(4)]
    row = hashed.agg(F.count(F.lit(1)), *(F.sum(lane.cast("decimal(38, 0)")) for lane in lanes)).collect()[0]
    return digests.RowSums(row[0], tuple(int(value or 0) % 2**64 for value in row[1:]))


def column_named(name: str) -> "Column":
    """Returns the column of this name, whatever characters the name has."""
    return F.col("`" + name.replace("`", "``") + "`")


@contextlib.contextmanager
def working_on(
    data: "DataFrame | SparkGraph", checkpoint_dir: str | os.PathLike[str] | None
) -> Iterator[tuple[SparkGraph, Checkpoints]]:
    """Yields a graph, attributed by default rules if a table is given, and checkpoints for one computation on it.

    After an error nothing is left of them; otherwise the graph of a table is released.
    """
    if not isinstance(data, SparkGraph) and not hasattr(data, "sparkSession"):
        raise InputError(f"data must be a Spark table or a SparkGraph, not {type(data).__name__}")
    graph = data if isinstance(data, SparkGraph) else attribute(data, checkpoint_dir=checkpoint_dir)
    checkpoints = Checkpoints(graph.checkpoints.spark, checkpoint_dir or os.path.dirname(graph.checkpoints.root))
    try:
        yield graph, checkpoints
    except BaseException:
        checkpoints.clear()
        raise
    finally:
        if graph is not data:
            graph.release()


def _checked_types(data: "DataFrame", options: DataOptions) -> dict[str, pa.DataType]:
    """Returns the types of the columns read; raises the errors of one machine for a table without rows."""
    from pyspark.sql.pandas.types import to_arrow_type

    read = {options.example_id, *options.user_columns()}
    fields = [(field.name, to_arrow_type(field.dataType) if field.name in read else pa.null()) for field in data.schema]
    attribute_table(pa.schema(fields).empty_table(), options, Location(), user_keys=None, aliases=None)
    return {name: kind for name, kind in fields if name in read}


def _needs_no_python(reading: _Reading) -> bool:
    kind = reading.types[reading.names[0]]
    entry = kind.value_type if pa.types.is_list(kind) else kind
    # The rules change no integer, except those for names, to which a minus sign is punctuation.
    numbers = pa.types.is_integer(entry) and not reading.rules.author_names
    plain = len(reading.names) == 1 and reading.options.separator is None and reading.aliases is None
    return plain and (numbers or (pa.types.is_string(entry) and reading.rules == UserKeyRules.exact()))


def _internal(kind: pa.DataType) -> str:
    return "bigint" if pa.types.is_integer(kind) else "string"


def _by_sql(data: "DataFrame", reading: _Reading) -> "DataFrame":
    """Returns id, users, problem using Spark alone; user keys are taken as they are."""
    name = reading.names[0]
    kind = reading.types[name]
    entry = _internal(kind.value_type if pa.types.is_list(kind) else kind)
    raw, own = column_named(name), column_named(reading.example_id)
    listed = raw if pa.types.is_list(kind) else F.array(raw)
    where = F.concat(F.lit(f" in column {name!r} at the row with id "), own.cast("string"))

    def said(what: str, remedy: str = "fill it in or remove the entry") -> "Column":
        return F.concat(F.lit(what), where, F.lit(f"; {remedy}"))

    checks = [
        (own.isNull(), F.lit(f"no id in column {reading.example_id!r}; fill it in")),
        (listed.isNull(), said("no list of users", "use an empty list for an example without users")),
        (F.exists(listed, lambda one: one.isNull()), said("a null user" if pa.types.is_list(kind) else "no user")),
    ]
    if entry == "string":
        checks.append((F.exists(listed, lambda one: one == ""), said("a blank user")))
    return data.select(
        own.cast(_internal(reading.types[reading.example_id])).alias("id"),
        F.array_distinct(listed.cast(f"array<{entry}>")).alias("users"),
        F.coalesce(*(F.when(wrong, text) for wrong, text in checks), *_not_utf8(reading)).alias("problem"),
    )


def _not_utf8(reading: _Reading) -> "list[Column]":
    """Returns for each text column a column with the problem of rows that are not UTF-8, else null."""
    found = []
    for name, kind in reading.types.items():
        column = column_named(name)
        text = F.lit(f"column {name!r} is not UTF-8; correct it or write the data again")
        if pa.types.is_string(kind):
            found.append(F.when(~F.is_valid_utf8(column), text))
        elif pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
            found.append(F.when(F.exists(column, lambda one: ~F.is_valid_utf8(one)), text))
    return found


def _by_python(data: "DataFrame", reading: _Reading) -> "DataFrame":
    """Returns id, users, problem using the code of one machine on batches of rows."""
    names = [reading.example_id, *reading.names]
    wrong = F.coalesce(F.lit(None).cast("string"), *_not_utf8(reading))
    given = data.select(*map(column_named, names), wrong.alias("problem"))
    schema = f"id {_internal(reading.types[reading.example_id])}, users array<string>, problem string"
    use_this_interpreter(given.sparkSession)
    check_python(given.sparkSession)
    attributed = given.rdd.mapPartitions(functools.partial(_attribute_rows, reading))
    # The schema is right by construction; checking it row by row would double the time.
    return given.sparkSession.createDataFrame(attributed, schema, verifySchema=False)


def _attribute_rows(reading: _Reading, given: Iterable[Any]) -> Iterator[tuple[Any, Any, str | None]]:
    """Converts rows to (id, keys, problem) by `attribute_table`, on the executors."""
    names, rows = [reading.example_id, *reading.names], iter(given)
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        problem = next((row[-1] for row in batch if row[-1] is not None), None)
        if problem is not None:
            yield None, None, problem
            continue
        table = pa.table(
            {name: pa.array([row[at] for row in batch], reading.types[name]) for at, name in enumerate(names)}
        )
        where = _RowsById(table.column(0))
        try:
            examples = attribute_table(table, reading.options, where, user_keys=reading.rules, aliases=reading.aliases)
        except InputError as error:
            yield None, None, str(error)
            continue
        graph = examples.graph
        keys = examples.user_keys.to_pylist()
        ids = graph.ids_of(np.arange(graph.num_examples)).to_pylist()
        bounds, owners = graph.indptr.tolist(), graph.users.tolist()
        for at, own in enumerate(ids):
            yield own, [keys[owner] for owner in owners[bounds[at] : bounds[at + 1]]], None


class _RowsById(Location):
    """A location whose errors name rows by id, since rows on a cluster have no numbers."""

    def __init__(self, ids: pa.ChunkedArray):
        super().__init__()
        self.ids = ids

    def row(self, number: int) -> str:
        return f"the row with id {self.ids[number].as_py()!r}"


def _merge_copies(rows: "DataFrame", example_id: str) -> "DataFrame":
    """Merges rows with the same id into one, with the users of all."""
    several = (F.col("id").cast("string") == "") & (F.count(F.lit(1)) > 1)
    empty = F.when(several, F.lit(f"column {example_id!r} is empty in several rows; give every row an id"))
    return rows.groupBy("id").agg(
        F.array_distinct(F.flatten(F.collect_list("users"))).alias("users"),
        F.coalesce(F.first("problem", ignorenulls=True), empty).alias("problem"),
    )


def _refuse_problems(examples: "DataFrame") -> None:
    found = examples.where(F.col("problem").isNotNull()).select("problem").limit(1).collect()
    if found:
        raise InputError(found[0][0])


def _without(
    examples: "DataFrame", unprotected: list[Any], rules: UserKeyRules, checkpoints: Checkpoints
) -> tuple["DataFrame", int]:
    """Returns the examples without these users, and how many of them the data have."""
    if not unprotected:
        return examples, 0
    wanted = rules.canonical([str(key) for key in unprotected]).unique().to_arrow()
    listed = examples.sparkSession.createDataFrame(pa.table({"user": wanted.cast(pa.string())}))
    gone = F.broadcast(listed.withColumn("gone", F.lit(True)))
    pairs = examples.select("id", F.explode_outer("users").alias("own"))
    marked = pairs.join(gone, F.col("own").cast("string") == F.col("user"), "left")
    present = {str(row[0]) for row in marked.where("gone").select("own").distinct().collect()}
    refuse_unknown_keys([key for key in wanted.to_pylist() if key not in present])
    kept = marked.groupBy("id").agg(F.collect_list(F.when(F.col("gone").isNull(), F.col("own"))).alias("users"))
    saved = checkpoints.save(kept, "protected")
    checkpoints.remove("attributed", "merged")
    return saved, len(present)
