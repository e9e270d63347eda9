"""Individual bounds for some users: from a mapping, a file, a table or a rule to the copies that each may be in."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.user_keys import UserKeyRules
from coowned.errors import InputError

MOST_COPIES = 2**31 - 1
"""The largest contribution bound: copies are counted in 32 bits."""

Bounds = Any
"""An integer, a mapping of keys to bounds, the path of a file, a table, `rule(key)`, or `UserBounds`."""

_RULES = (UserKeyRules.exact(), UserKeyRules(), UserKeyRules.authors())  # in the order in which they are tried
_FROM_MEMORY = ("digest", "users")  # what `settings` says of bounds; nobody's key has text for a bound


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class UserBounds:
    """The bound of each listed user, and that of all others.

    A tier is what people with one bound are called: the column `tier` of a file or table, by default "bound 3". A key
    is matched as it is and, if nobody has it, by the rules that make keys of names and addresses. If several rows name
    one person, the smallest bound counts.

    Guarantees:
      - The digest depends on keys, bounds and tiers alone, not on their order.   (test_digest_ignores_order)
      - A mapping, a table and a file with the same rows are the same.   (test_every_form_is_the_same)
      - What cannot be a bound is refused with its row.   (test_wrong_bounds_are_refused)

    Example:
      >>> bounds = UserBounds.of({"ann": 1, "bob": 0}, others=3)
      >>> graph = AttributionGraph.from_users_per_example([[0, 1], [2]], user_keys=["ann", "bob", "carol"])
      >>> bounds.of_users(graph)
      array([1, 0, 3], dtype=int32)
    """

    table: pl.DataFrame  # key, bound, tier; sorted, every key once
    others: int  # the bound of users who are not in the table

    def __repr__(self) -> str:
        return f"UserBounds({self.table.height} users, others={self.others})"  # without keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserBounds) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, given: Bounds, *, others: int) -> "UserBounds":
        """Reads bounds in any form but a rule's, which needs a graph."""
        if isinstance(given, UserBounds):
            return cls(table=given.table, others=others)
        if isinstance(given, str | os.PathLike):
            from coowned.attribution.table_files import read_small_table

            return cls._from_table(read_small_table(given), str(given), others)
        if not isinstance(given, Mapping):
            from coowned.attribution.tables import to_arrow_table

            return cls._from_table(to_arrow_table(given), "contribution_bounds", others)
        if set(given) == set(_FROM_MEMORY) and isinstance(given["digest"], str):
            raise InputError(
                "contribution_bounds were given to `fit` in memory and are not in the configuration; call `fit` again "
                "with them, or name a file"
            )
        columns = {"user": [None if key is None else str(key) for key in given], "bound": list(given.values())}
        try:
            table = pa.table(columns)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(f"contribution_bounds must map user keys to integers ({error})") from None
        return cls._from_table(table, "contribution_bounds", others)

    @classmethod
    def of_rule(cls, rule: Callable[[Any], int], graph: AttributionGraph, *, others: int) -> "UserBounds":
        """Evaluates the rule for every user key; whatever else it looks at must be public metadata."""
        return cls.of({str(key): rule(key) for key in _keys(graph).to_pylist()}, others=others)

    @classmethod
    def _from_table(cls, table: pa.Table, where: str, others: int) -> "UserBounds":
        rows = pl.DataFrame(table)
        if missing := {"user", "bound"} - set(rows.columns):
            raise InputError(
                f"{where}: bounds need the columns user and bound (and tier, if tiers have names); {min(missing)!r} is "
                f"missing among {rows.columns}"
            )
        bound = rows["bound"]
        if rows.height and not (bound.dtype.is_integer() or bound.dtype == pl.String):
            raise InputError(f"{where}: column 'bound' must contain integers, not {bound.dtype}")
        bound = bound.cast(pl.Int64, strict=False)
        users = rows["user"].cast(pl.String)
        wrong = ~bound.is_between(0, MOST_COPIES).fill_null(False) | (users.str.strip_chars().fill_null("") == "")
        if wrong.any():
            row = int(wrong.arg_true()[0])
            raise InputError(
                f"{where}: row {row} needs a user and a bound from 0 to {MOST_COPIES:,}, not {rows['bound'][row]!r}"
            )
        tier = pl.Series("tier", [None] * rows.height, pl.String)
        if "tier" in rows.columns:
            tier = rows["tier"].cast(pl.String).replace("", None)  # an empty cell of a CSV file
        unnamed = pl.format("bound {}", "bound")
        named = pl.DataFrame({"key": users, "bound": bound.cast(pl.Int32), "tier": tier})
        named = named.with_columns(pl.coalesce("tier", unnamed))
        made = cls(table=_smallest(named).sort("key"), others=others)
        made.check_tiers()
        return made

    def at_most(self, bound: int) -> "UserBounds":
        """Returns these bounds, larger ones lowered to `bound`; names stay."""
        lowered = self.table.with_columns(pl.min_horizontal("bound", pl.lit(bound, pl.Int32)))
        return UserBounds(table=lowered, others=min(self.others, bound))

    @functools.cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that identify keys, bounds and tiers."""
        hashed = hashlib.sha256(f"coowned-user-bounds-1 {self.others}".encode())
        for row in self.table.iter_rows():
            for value in row:
                text = str(value).encode()
                hashed.update(f" {len(text)} ".encode() + text)
        return hashed.hexdigest()

    @functools.cached_property
    def tiers(self) -> dict[str, int]:
        """The bound of each tier by name, largest first, with that of the users who are not listed."""
        found = dict(self.table.select("tier", "bound").unique().iter_rows()) | {f"bound {self.others}": self.others}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def check_tiers(self) -> None:
        """Raises an error if two bounds have the same name."""
        for tier, bound in self.table.select("tier", "bound").unique().iter_rows():
            if self.tiers[tier] != bound:
                raise InputError(
                    f"tier {tier!r} has two bounds, {self.tiers[tier]} and {bound}; give each a name of its own"
                )

    def settings(self) -> dict[str, Any]:
        """Returns the description in a certificate or configuration: no keys."""
        return dict(zip(_FROM_MEMORY, (self.digest, self.table.height), strict=True))

    def of_users(self, graph: AttributionGraph) -> npt.NDArray[np.int32]:
        """Returns the most copies that each user of the graph may be in, shape (num_users,)."""
        users = pl.DataFrame({"key": pl.Series(_keys(graph)).cast(pl.String)})
        known = self.for_keys(users["key"]).select("key", "bound")
        found = users.join(known, on="key", how="left", maintain_order="left")["bound"]
        return found.fill_null(self.others).cast(pl.Int32).to_numpy().copy()

    def for_keys(self, keys: pl.Series) -> pl.DataFrame:
        """Returns the table with the keys that these users have, every one once; rows of nobody keep theirs."""
        found, rest = [], self.table
        for rules in _RULES:
            spelled = rest.with_columns(rules.canonical(rest["key"]).alias("spelled"))
            known = spelled["spelled"].is_in(keys.implode())
            found.append(spelled.filter(known).select(pl.col("spelled").alias("key"), "bound", "tier"))
            rest = rest.filter(~known)
        return _smallest(pl.concat([*found, rest]))

    def spellings(self) -> list[str]:
        """Returns every key that a row may be for."""
        return sorted({key for rules in _RULES for key in rules.canonical(self.table["key"])})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, read back by `from_dict`."""
        return {"others": self.others, **self.table.to_dict(as_series=False)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "UserBounds":
        """Reads `to_dict()` back."""
        columns = {"user": stored["key"], "bound": stored["bound"], "tier": stored["tier"]}
        kinds = {"user": pl.String, "bound": pl.Int64, "tier": pl.String}
        return cls.of(pl.DataFrame(columns, schema=kinds), others=stored["others"])


def _smallest(rows: pl.DataFrame) -> pl.DataFrame:
    """Returns every key once, with its smallest bound."""
    return rows.sort("bound", "tier").unique("key", keep="first", maintain_order=True)


def _keys(graph: AttributionGraph) -> pa.Array:
    return pa.array(np.arange(graph.num_users)) if graph.user_keys is None else graph.user_keys
