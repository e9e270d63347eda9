"""Attributed examples: the graph, the ids, the user keys and the content, row by row."""

import dataclasses
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute

from coowned.attribution.graph import AttributionGraph, drop_users, group_pairs, take_rows
from coowned.attribution.identifiers import Location, as_identifiers, first_true, type_of_ids
from coowned.attribution.user_keys import (
    Aliases,
    UserKeyRules,
    UserMapping,
    among,
    looks_like_several,
    split_addresses,
    with_destinations,
    with_two_addresses,
)
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

SEVERAL = "users_that_look_like_several"  # a note
BATCH_CHARACTERS = 8 << 20  # of the texts that become one Arrow batch
# How other programs write a missing value; such users are reported, not dropped.
_MISSING = ["nan", "none", "null", "na", "n/a", "#n/a", "nil", "undefined", "<na>"]


class HasCopies(Protocol):
    """An object with a number of copies per example."""

    @property
    def copies(self) -> np.ndarray: ...


class Content(Protocol):
    """Content that is read separately from ids and users."""

    @property
    def schema(self) -> pa.Schema: ...

    def pieces(self, examples: np.ndarray) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yields (indices into `examples`, table of their content), each example once."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributedExamples:
    """The result of every source: the owners of each example and its content, in the same row order.

    Guarantees:
      - Row i of `payload`, `ids[i]` and example i of `graph` are one thing.   (test_rows_stay_together)
      - Printing it shows neither content nor user keys.   (test_printing_shows_no_content_and_no_keys)

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["ann", "bob"], ["bob"]], "text": ["hi", "note"]})
      >>> examples
      AttributedExamples(num_examples=2, num_users=2, num_pairs=3, columns=['users', 'text'])
      >>> examples.without_users(["bob"]).graph.num_unprotected_users
      1
    """

    graph: AttributionGraph
    payload: pa.Table
    user_mapping: UserMapping
    key_rules: UserKeyRules
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    content: Content | None = None  # where content was not read: `payload` then has no more than ids and users

    def __repr__(self) -> str:
        graph = self.graph
        counts = f"num_examples={graph.num_examples}, num_users={graph.num_users}, num_pairs={graph.num_pairs}"
        return f"AttributedExamples({counts}, columns={self.schema.names})"

    @property
    def schema(self) -> pa.Schema:
        """The columns of the content, whether it was read or not."""
        return self.payload.schema if self.content is None else self.content.schema

    def pieces(self, examples: np.ndarray) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yields (indices into `examples`, table of their content), in one piece if content is in memory.

        Guarantees:
          - They are the rows that reading everything gives.   (test_pieces_are_the_rows)
        """
        if self.content is None:
            yield np.arange(len(examples)), self.payload.take(pa.array(examples))
        else:
            yield from self.content.pieces(examples)

    @property
    def ids(self) -> pa.Array:
        """(num_examples,) example ids, int64 or text; the row numbers where the source has none."""
        return self.graph.ids_of(np.arange(self.graph.num_examples))

    @property
    def user_keys(self) -> pa.Array:
        """(num_users,) canonical user keys."""
        return self.user_mapping.user_keys

    def without_users(self, keys: Iterable[Any]) -> "AttributedExamples":
        """Removes users from the attribution: they are no longer protected, and are counted but never named.

        Keys are read by the same rules as the data. A key that nobody in the data has is an error: the list may be of
        other data, or misspelled. Choose the list without looking at content.
        """
        if isinstance(keys, (str, bytes)):
            raise InputError("keys must be a list of user keys, not one string; write [key]")
        wanted = self.key_rules.canonical(pl.Series([str(key) for key in keys], dtype=pl.String)).unique()
        user_keys = pl.Series(self.user_keys)
        refuse_unknown_keys(wanted.filter(~wanted.is_in(user_keys.implode())).to_list())
        gone = user_keys.is_in(wanted.implode()).to_numpy()
        graph, mapping = self.graph.without_users(np.flatnonzero(gone)), self.user_mapping
        rows = drop_users(mapping.indptr, mapping.users, ~gone)
        keys_left = mapping.user_keys.filter(pa.array(~gone))
        return dataclasses.replace(self, graph=graph, user_mapping=UserMapping(mapping.spellings, *rows, keys_left))


def refuse_unknown_keys(unknown: Sequence[str]) -> None:
    """Raises InputError if a list of unprotected users has keys that are not in the data."""
    if unknown:
        count = "1 unprotected key is" if len(unknown) == 1 else f"{len(unknown):,} unprotected keys are"
        raise InputError(
            f"{count} not in the data, the first is {min(unknown)!r}; correct or remove them; list users by their "
            "keys after aliases are applied (`coowned inspect --show-keys`)"
        )


def take(examples: AttributedExamples, selection: HasCopies) -> pa.Table:
    """Returns the selected rows, in input order, with their number of copies in a `copies` column.

    Example:
      >>> from coowned import Greedy, from_table
      >>> examples = from_table({"users": [["ann", "bob"], ["bob"]], "text": ["hi", "note"]})
      >>> take(examples, Greedy(contribution_bound=1).select(examples.graph))["text"].to_pylist()
      ['note']
    """
    copies = np.asarray(selection.copies)
    if len(copies) != examples.graph.num_examples:
        raise InputError(
            f"the selection is for {len(copies)} examples, not {examples.graph.num_examples}; select again"
        )
    chosen_from = getattr(selection, "graph", None)
    if chosen_from is not None and not _same_ids(chosen_from, examples.graph):
        raise InputError("the selection is for other examples than these; select from examples.graph")
    if "copies" in examples.payload.column_names:
        raise InputError("the data have a column named copies; rename it before taking the selected rows")
    chosen = copies > 0
    # Filtering keeps the chunks: taking rows would join them, and text beyond 2 GB does not fit in one.
    return examples.payload.filter(pa.array(chosen)).append_column("copies", pa.array(copies[chosen].astype(np.int32)))


def _same_ids(one: AttributionGraph, other: AttributionGraph) -> bool:
    if one is other or one.example_ids is None or other.example_ids is None:
        return one.example_ids is other.example_ids
    return one.example_ids.equals(other.example_ids)


class Mentions(NamedTuple):
    """The user spellings of each row as found; every spelling is stored once."""

    indptr: np.ndarray  # (rows + 1,) int64
    codes: np.ndarray  # (entries,) index into spellings
    spellings: pa.Array  # (spellings,) large_string, in the order found


def valid_text(value: object) -> str:
    """Replaces lone surrogates, which JSON can hold, by question marks; returns "" for a value that is not text.

    >>> valid_text("a\\ud800b"), valid_text(["no text"])
    ('a?b', '')
    """
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


class MentionsBuilder:
    """A builder of `Mentions`, one row at a time."""

    def __init__(self) -> None:
        self._spellings: dict[str, int] = {}  # with the code of each
        self._counts = array("q")  # of each row
        self._codes = array("i")  # row after row

    def code(self, spelling: str) -> int:
        return self._spellings.setdefault(spelling, len(self._spellings))

    def add_mentions(self, codes: Collection[int]) -> None:
        """Adds the spellings of the next row, by code."""
        self._counts.append(len(codes))
        self._codes.extend(codes)

    def mentions(self) -> Mentions:
        indptr = np.concatenate([[0], np.cumsum(np.frombuffer(self._counts, dtype=np.int64))])
        codes = np.frombuffer(self._codes, dtype=np.int32)
        return Mentions(indptr, codes, pa.array(list(self._spellings), pa.large_string()))


class ExampleBuilder(MentionsBuilder):
    """A builder of examples as Arrow columns, so that a large source is never held as Python objects.

    Every row has its values (`add_row`) and its users (`add_mentions`), both in row order; users may come later.
    """

    def __init__(self, schema: pa.Schema):
        super().__init__()
        self._schema = pa.schema([("", pa.large_string()), *schema])  # the id first
        self._batches: list[pa.RecordBatch] = []
        self._num_rows = 0
        self._start_batch()

    def add_row(self, example_id: str, *values: Any, characters: int = 0) -> None:
        """Adds the id and the payload of one row; characters: about how many they have together."""
        for column, value in zip(self._rows, (example_id, *values), strict=True):
            column.append(value)
        self._num_rows += 1
        self._characters += characters + 100
        if self._characters >= BATCH_CHARACTERS:
            self._end_batch()

    def __len__(self) -> int:
        return self._num_rows

    def payload(self) -> pa.Table:
        """Returns the rows added so far, without their ids."""
        return self._table().remove_column(0)

    def ids(self) -> pa.ChunkedArray:
        """Returns the (rows,) ids added so far."""
        return self._table().column(0)

    def attribute(self, mentions: Mentions | None = None, **settings: Any) -> "AttributedExamples":
        """Calls `attribute` on all rows, by default with the users that were added."""
        table = self._table()
        return attribute(
            mentions or self.mentions(), example_ids=table.column(0), payload=table.remove_column(0), **settings
        )

    def _start_batch(self) -> None:
        self._rows: list[list[Any]] = [[] for _ in self._schema]
        self._characters = 0

    def _end_batch(self) -> None:
        if self._rows[0]:
            columns = [pa.array(rows, field.type) for rows, field in zip(self._rows, self._schema, strict=True)]
            self._batches.append(pa.record_batch(columns, schema=self._schema))
            self._start_batch()

    def _table(self) -> pa.Table:
        self._end_batch()
        return pa.Table.from_batches(self._batches, self._schema)


class Origin(NamedTuple):
    """The source of some examples, and the notes its reader made."""

    location: str | Location = ""  # what to call the source in errors
    columns_read: Sequence[str] = ()  # that ids and users were derived from
    notes: Mapping[str, int] | None = None  # counts that the reader reports
    repeats: str = "repeated_rows"  # the name of the note that counts rows which repeat an id; empty for no note


_UNKNOWN = Origin()


def attribute(
    users: pa.Array | pa.ChunkedArray | Mentions,
    *,
    example_ids: Any,
    payload: pa.Table,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    addresses: bool | None = False,
    origin: Origin = _UNKNOWN,
) -> AttributedExamples:
    """Builds attributed examples from the raw user spellings of each row.

    Rows with the same id are copies of one example: it has the users of all of them and the payload of the first.

    Args:
      users: a list column of text or integers, in which null lists and null users are errors; or `Mentions`.
      example_ids: one id per row, or None for the row number.
      payload: the content, one row per example.
      user_keys: the rules that make keys of spellings; None for the default ones.
      aliases: an `Aliases`, or the path of its CSV file.
      addresses: read each spelling that has an @ as an address header, which may name several people; None: it is not
        known whether one does, and a user with two addresses is an error. With False that is one user.
      origin: where they were read from.
    """
    rules, columns_read = user_keys or UserKeyRules(), origin.columns_read
    where = origin.location if isinstance(origin.location, Location) else Location(origin.location)
    column = f"column {columns_read[-1]!r}" if len(columns_read) else "users"
    mentions = users if isinstance(users, Mentions) else encode(users, where=where, column=column)
    indptr, codes, spellings = mentions
    if len(indptr) - 1 != payload.num_rows:
        raise InputError(f"{where}{len(indptr) - 1} lists of users for {payload.num_rows} rows; give one list per row")
    names = pl.Series(spellings)
    name_ends, names = split_addresses(names) if addresses else (np.arange(len(names) + 1), names)
    keys = rules.canonical(names)
    blank = np.flatnonzero((keys == "").to_numpy())
    if len(blank):
        spelling = int(np.searchsorted(name_ends, blank[0], side="right")) - 1
        row = int(np.searchsorted(indptr, first_true(codes == spelling), side="right")) - 1
        raise InputError(f"{where}blank user in {column} at {where.row(row)}; fill it in or remove the entry")
    name_ends, keys = with_destinations(name_ends, keys, rules)
    known = read_aliases(aliases)
    key_ends, key_users, key_array = _number_keys(keys, known, rules)
    spelling_indptr, spelling_users = _expand(name_ends, np.arange(len(keys)), key_ends, key_users)
    mapping = UserMapping(spellings, spelling_indptr, spelling_users, key_array)
    user_names = pl.Series(key_array)
    if addresses is not False and len(several := with_two_addresses(user_names)):
        entry = first_true(np.isin(spelling_users, several.to_numpy()))
        spelling = int(np.searchsorted(spelling_indptr, entry, side="right")) - 1
        row = int(np.searchsorted(indptr, first_true(codes == spelling), side="right")) - 1
        raise InputError(
            f"{where}one user with two addresses in {column} at {where.row(row)}; give separator= (--separator), the "
            "text between two users of a cell, or addresses=True (--addresses) if cells are written as in mail; "
            "addresses=False (--no-addresses) makes it one user"
        )
    name = f"{where}{'example_ids' if len(columns_read) < 2 else f'column {columns_read[0]!r}'}"
    ids = as_identifiers(example_ids, name=name, length=payload.num_rows, row_name=where.row, unique=False)
    found = {**(origin.notes or {}), **_doubtful_keys(user_names, rules)}
    if unused := _unused_aliases(keys, known, rules):
        found["aliases_that_match_no_user"] = unused
    if ids is not None and pl.Series(ids).n_unique() < len(ids):
        rows = len(ids)
        empty = np.flatnonzero((pl.Series(ids).cast(pl.String) == "").to_numpy())
        if len(empty) > 1:
            raise InputError(f"{name} is empty at {where.row(empty[0])} and {where.row(empty[1])}; give each row an id")
        ids, indptr, codes, payload = _merge_copies(ids, indptr, codes, payload)
        found |= {origin.repeats: rows - len(ids)} if origin.repeats else {}
    if len(spelling_users) == len(spellings) == len(keys):
        labels = spelling_users[codes]
    else:
        indptr, labels = _expand(indptr, codes, spelling_indptr, spelling_users)
    graph = AttributionGraph.from_csr(indptr, labels, num_users=len(key_array), columns_read=columns_read)
    # Ids are unique by now, and so are keys, which come from a dictionary: they need no second check.
    graph = dataclasses.replace(graph, example_ids=ids, user_keys=key_array, id_type=type_of_ids(example_ids))
    return AttributedExamples(graph=graph, payload=payload, user_mapping=mapping, key_rules=rules, notes=found)


def read_aliases(aliases: Aliases | str | os.PathLike[str] | None) -> Aliases | None:
    """Returns the aliases, read from their file if given as a path."""
    return Aliases.read(Path(aliases)) if isinstance(aliases, (str, os.PathLike)) else aliases


def unify(entries: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Factorizes text or integers: returns the (entries,) codes and the large_string value of each code."""
    chunked = entries if isinstance(entries, pa.ChunkedArray) else pa.chunked_array([entries])
    if pa.types.is_null(chunked.type):  # every list is empty
        chunked = chunked.cast(pa.large_string())
    is_foreign = pa.types.is_dictionary(chunked.type)
    encoded = (chunked if is_foreign else chunked.dictionary_encode()).unify_dictionaries()
    joined = encoded.chunk(0) if encoded.num_chunks == 1 else encoded.combine_chunks()
    codes, words = np.asarray(joined.indices), joined.dictionary
    if is_foreign:
        # A foreign dictionary may contain values that no entry has.
        used = np.zeros(len(words), dtype=bool)
        used[codes] = True
        if not used.all():
            codes, words = (np.cumsum(used, dtype=np.int32) - np.int32(1))[codes], words.filter(pa.array(used))
    return codes, words.cast(pa.large_string())


def encode(users: pa.Array | pa.ChunkedArray, *, where: Location, column: str) -> Mentions:
    """Factorizes a list column of users; null lists and null users are errors."""
    if users.null_count:
        row = where.row(first_true(users.is_null()))
        raise InputError(
            f"{where}no list of users in {column} at {row}; use an empty list for an example without users"
        )
    indptr = np.concatenate([[0], np.cumsum(np.asarray(pc.list_value_length(users)), dtype=np.int64)])
    entries = pc.list_flatten(users)
    chunks = entries.chunks if isinstance(entries, pa.ChunkedArray) else [entries]
    if pa.types.is_dictionary(entries.type) and any(chunk.dictionary.null_count for chunk in chunks):
        entries = entries.cast(entries.type.value_type)  # Arrow neither counts nor unifies nulls among the values
    if entries.null_count:
        row = int(np.searchsorted(indptr, first_true(entries.is_null()), side="right")) - 1
        raise InputError(f"{where}null user in {column} at {where.row(row)}; fill it in or remove the entry")
    return Mentions(indptr, *unify(entries))


def _merge_copies(
    ids: pa.Array, indptr: np.ndarray, codes: np.ndarray, payload: pa.Table
) -> tuple[pa.Array, np.ndarray, np.ndarray, pa.Table]:
    """Merges rows with the same id, in order of first appearance: the users of all rows, the payload of the first."""
    encoded = ids.dictionary_encode()
    example = np.asarray(encoded.indices)  # (rows,)
    is_first = np.zeros(len(ids), dtype=bool)
    is_first[np.unique(example, return_index=True)[1]] = True
    new_indptr, grouped = group_pairs(np.repeat(example, np.diff(indptr)), codes, len(encoded.dictionary))
    return encoded.dictionary, new_indptr, grouped, payload.filter(pa.array(is_first))


def _number_keys(
    keys: pl.Series, aliases: Aliases | None, rules: UserKeyRules
) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """Returns the users of each spelling, as compressed rows of labels, and the (users,) keys."""
    if aliases is None:
        encoded = keys.to_arrow().cast(pa.large_string()).dictionary_encode()
        return np.arange(len(keys) + 1), np.asarray(encoded.indices), encoded.dictionary
    resolved = aliases.canonical(rules).users_of
    lists = [resolved.get(key, (key,)) for key in keys.to_list()]
    counts = np.fromiter((len(entry) for entry in lists), dtype=np.int64, count=len(lists))
    flat = pa.array([user for entry in lists for user in entry], pa.large_string()).dictionary_encode()
    return np.concatenate([[0], np.cumsum(counts)]), np.asarray(flat.indices), flat.dictionary


def _unused_aliases(keys: pl.Series, aliases: Aliases | None, rules: UserKeyRules) -> int:
    """Counts the aliases whose key is neither in the data nor in another alias, and so perhaps misspelled."""
    if aliases is None:
        return 0
    of_others = [user for key, users in aliases.users_of.items() for user in users if user != key]
    own = rules.canonical(pl.Series(list(aliases.users_of), dtype=pl.String)).unique()
    used = among(own, keys) | among(own, rules.canonical(pl.Series(of_others, dtype=pl.String)))
    return int((~used).sum())


def _doubtful_keys(keys: pl.Series, rules: UserKeyRules) -> dict[str, int]:
    """Counts keys to review: they may not be people, or may be duplicates of one person."""
    missing = int(keys.is_in(_MISSING).sum())
    decimals = keys.filter(keys.str.contains(r"^\d+\.0+$"))
    numbers = int(among(decimals.str.replace(r"\.0+$", ""), keys).sum()) if len(decimals) else 0
    counts = {
        "users_named_like_a_missing_value": missing,
        "users_that_are_one_number_in_two_spellings": numbers,
        SEVERAL: len(looks_like_several(keys, rules)),
    }
    return {name: count for name, count in counts.items() if count}


def _expand(
    indptr: np.ndarray, codes: np.ndarray, spelling_indptr: np.ndarray, spelling_users: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each spelling by its users: the address of a list by its members."""
    ends, users = take_rows(spelling_indptr, spelling_users, codes)
    return ends[indptr], users
