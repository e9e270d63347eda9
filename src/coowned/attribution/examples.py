"""Attributed examples: the graph, the ids, the user keys and the content, row by row."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import as_identifiers, first_true
from coowned.attribution.places import Place
from coowned.attribution.user_keys import Aliases, UserKeyRules, UserMapping
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them


class HasCopies(Protocol):
    """Anything that says how often each example was selected."""

    @property
    def copies(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributedExamples:
    """What every source gives: who owns each example, and its content, in the same row order.

    Guarantees:
      - Row i of `payload`, `ids[i]` and example i of `graph` are one thing.   (test_rows_stay_together)

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["ann", "bob"], ["bob"]], "text": ["hi", "note"]})
      >>> examples.graph
      AttributionGraph(num_examples=2, num_users=2, num_pairs=3)
      >>> examples.without_users(["bob"]).graph.num_unprotected_users
      1
    """

    graph: AttributionGraph
    payload: pa.Table
    user_mapping: UserMapping
    key_rules: UserKeyRules
    notes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def ids(self) -> pa.Array:
        """(num_examples,) example ids, int64 or text; the row numbers where the source has none."""
        return self.graph.ids_of(np.arange(self.graph.num_examples))

    @property
    def user_keys(self) -> pa.Array:
        """(num_users,) canonical user keys."""
        return self.user_mapping.user_keys

    def without_users(self, keys: Iterable[Any]) -> "AttributedExamples":
        """Takes people out of the attribution: they are no longer protected; their number travels on, never their keys.

        Keys are read by the same rules as the data. A key that nobody in the data has is passed over and counted in
        `notes`: leaving a person protected is the safe side. Choose the list without looking at content.
        """
        if isinstance(keys, (str, bytes)):
            raise InputError("keys must be a list of user keys, not one string; write [key]")
        wanted = self.key_rules.canonical(pl.Series([str(key) for key in keys], dtype=pl.String)).unique()
        gone = pl.Series(self.user_keys).is_in(wanted.implode()).to_numpy()
        unknown = len(wanted) - int(gone.sum())
        return dataclasses.replace(
            self,
            graph=self.graph.without_users(np.flatnonzero(gone)),
            user_mapping=self.user_mapping.without(~gone),
            notes={**self.notes, **({"unprotected_keys_not_in_the_data": unknown} if unknown else {})},
        )


def take(examples: AttributedExamples, selection: HasCopies) -> pa.Table:
    """The selected rows, in input order, with their number of copies in a `copies` column.

    Example:
      >>> from coowned import Greedy, from_table
      >>> examples = from_table({"users": [["ann", "bob"], ["bob"]], "text": ["hi", "note"]})
      >>> take(examples, Greedy(contribution_bound=1).select(examples.graph))["text"].to_pylist()
      ['note']
    """
    copies = np.asarray(selection.copies)
    if len(copies) != examples.graph.num_examples:
        raise InputError(
            f"the selection is for {len(copies)} examples, these are {examples.graph.num_examples}; "
            "select from examples.graph"
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
    if one is other:
        return True
    if one.example_ids is None or other.example_ids is None:
        return one.example_ids is other.example_ids
    return one.example_ids.equals(other.example_ids)


def attribute(
    users: pa.Array | pa.ChunkedArray,
    *,
    example_ids: Any,
    payload: pa.Table,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
    columns_read: Sequence[str] = (),
    notes: Mapping[str, int] | None = None,
    place: str | Place = "",
) -> AttributedExamples:
    """Builds attributed examples from a list column of raw user spellings, one list an example.

    Args:
      users: lists of text or whole numbers; null lists and null users are errors.
      example_ids: one id a row, or None for the row number.
      payload: the content, one row an example.
      user_keys: the rules that make keys of spellings; None for the default ones.
      aliases: what stands for whom, or the path of a CSV file that says it.
      columns_read: the names of what ids and users were made from.
      notes: counts a reader wants to tell.
      place: what to call the source in errors.
    """
    rules = user_keys or UserKeyRules()
    where = place if isinstance(place, Place) else Place(place)
    column = f"column {columns_read[-1]!r}" if len(columns_read) else "users"
    indptr, codes, spellings = _encode(users, where=where, column=column)
    if len(indptr) - 1 != payload.num_rows:
        raise InputError(
            f"{where}{len(indptr) - 1} lists of users for {payload.num_rows} rows of payload; give one a row"
        )
    keys = rules.canonical(pl.Series(spellings))
    blank = (keys == "").to_numpy()
    if blank.any():
        row = int(np.searchsorted(indptr, first_true(blank[codes]), side="right")) - 1
        raise InputError(f"{where}a blank user in {column} at {where.row(row)}; name the user or leave the entry out")
    spelling_indptr, spelling_users, key_array = _number_keys(keys, aliases, rules)
    mapping = UserMapping(spellings, spelling_indptr, spelling_users, key_array)
    if len(spelling_users) == len(spellings):
        labels = spelling_users[codes]
    else:
        indptr, labels = _expand(indptr, codes, spelling_indptr, spelling_users)
    name = f"{where}{'example_ids' if len(columns_read) < 2 else f'column {columns_read[0]!r}'}"
    ids = as_identifiers(example_ids, name=name, length=payload.num_rows, row_name=where.row)
    graph = AttributionGraph.from_csr(indptr, labels, num_users=len(key_array), columns_read=columns_read)
    # Ids have been checked above, and keys are unique as they come from a dictionary: no need to look twice.
    graph = dataclasses.replace(graph, example_ids=ids, user_keys=key_array)
    return AttributedExamples(
        graph=graph, payload=payload, user_mapping=mapping, key_rules=rules, notes=dict(notes or {})
    )


def read_aliases(aliases: Aliases | str | os.PathLike[str] | None) -> Aliases | None:
    """Aliases as they are, or read from their file."""
    return Aliases.read(Path(aliases)) if isinstance(aliases, (str, os.PathLike)) else aliases


def unify(entries: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Factorizes text or whole numbers: the (entries,) code of each, and the (codes,) large_string they stand for."""
    chunked = entries if isinstance(entries, pa.ChunkedArray) else pa.chunked_array([entries])
    encoded = chunked if pa.types.is_dictionary(chunked.type) else chunked.dictionary_encode()
    if encoded.num_chunks == 0:
        return np.zeros(0, dtype=np.int32), pa.array([], pa.large_string())
    chunks = encoded.unify_dictionaries().chunks
    parts = [np.asarray(chunk.indices) for chunk in chunks]
    codes = parts[0] if len(parts) == 1 else np.concatenate(parts)
    words = chunks[0].dictionary
    if encoded is chunked:
        # The dictionary was made elsewhere: it may name what no entry has.
        used = np.zeros(len(words), dtype=bool)
        used[codes] = True
        if not used.all():
            codes, words = (np.cumsum(used, dtype=np.int32) - np.int32(1))[codes], words.filter(pa.array(used))
    return codes, words.cast(pa.large_string())


def _encode(users: pa.Array | pa.ChunkedArray, *, where: Place, column: str) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """(rows + 1,) int64 row ends, (entries,) spelling of each entry, (spellings,) large_string in order found."""
    if users.null_count:
        row = where.row(first_true(users.is_null()))
        raise InputError(f"{where}no list of users in {column} at {row}; give an empty list for nobody")
    indptr = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(np.asarray(pc.list_value_length(users)), out=indptr[1:])
    entries = pc.list_flatten(users)
    missing = entries.is_null() if entries.null_count else None
    if missing is None:
        codes, spellings = unify(entries)
        if spellings.null_count:  # a dictionary may hide its null among its values
            missing = pa.array(np.asarray(spellings.is_null())[codes])
        else:
            return indptr, codes, spellings
    row = int(np.searchsorted(indptr, first_true(missing), side="right")) - 1
    raise InputError(f"{where}a null user in {column} at {where.row(row)}; name the user or leave the entry out")


def _number_keys(
    keys: pl.Series, aliases: Aliases | str | os.PathLike[str] | None, rules: UserKeyRules
) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """For each spelling the users it stands for, as compressed rows of labels, and the (users,) keys."""
    known = read_aliases(aliases)
    if known is None:
        encoded = keys.to_arrow().cast(pa.large_string()).dictionary_encode()
        return np.arange(len(keys) + 1), np.asarray(encoded.indices), encoded.dictionary
    resolved = known.canonical(rules).users_of
    lists = [resolved.get(key, (key,)) for key in keys.to_list()]
    counts = np.fromiter((len(entry) for entry in lists), dtype=np.int64, count=len(lists))
    flat = pa.array([user for entry in lists for user in entry], pa.large_string()).dictionary_encode()
    return np.concatenate([[0], np.cumsum(counts)]), np.asarray(flat.indices), flat.dictionary


def _expand(
    indptr: np.ndarray, codes: np.ndarray, spelling_indptr: np.ndarray, spelling_users: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the members of a list in the place of its address."""
    counts = np.diff(spelling_indptr)[codes]  # (entries,)
    ends = np.concatenate([[0], np.cumsum(counts)])
    starts = np.repeat(spelling_indptr[codes] - ends[:-1], counts)
    return ends[indptr], spelling_users[np.arange(ends[-1]) + starts]
