"""The interface of selectors, and their results: a `Selection` or a `Schedule`.

A selector is a frozen dataclass of public settings; the graph and the seed are arguments of `select`, because they
may differ from run to run. `select` sees the graph alone, so a selector cannot leak the content of an example.
"""

import abc
import dataclasses
import functools
import hashlib
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.graph import AttributionGraph, read_only
from coowned.attribution.identifiers import utf8_buffers
from coowned.attribution.options import Option
from coowned.codec import decode_json, encode_json, to_plain
from coowned.errors import CertificateMismatchError, InputError
from coowned.progress import Progress, counted, reporting
from coowned.selection.user_bounds import MOST_COPIES, Bounds, UserBounds


class _StoredOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The required entries of both formats."""

    graph_digest: str | None
    ids_digest: str | None
    selector: dict[str, Any]
    seed: int | None
    proven_optimal: bool

    def fields(self) -> dict[str, Any]:
        """Returns the entries under the names that they have in `Selected`."""
        fields = msgspec.structs.asdict(self)
        for name in ("graph_digest", "ids_digest"):
            fields[f"stored_{name}"] = fields.pop(name)
        return fields


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _StoredSelection(_StoredOrigin, frozen=True, kw_only=True):
    num_examples: _Count
    upper_bound: int | None
    indices: list[_Count]
    copies: list[_Count]
    groups: list[_Count] | None
    user_bounds: dict[str, Any] | None = None


class _StoredSchedule(_StoredOrigin, frozen=True, kw_only=True):
    num_examples: _Count
    min_separation: int | None
    lower_bound: int | None
    batch_size: _Count
    batches: list[list[_Count]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Selected:
    """The common part of `Selection` and `Schedule`: their origin, and the graph they belong to."""

    graph: AttributionGraph | None = dataclasses.field(default=None, repr=False, compare=False)
    selector: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    proven_optimal: bool = False
    stored_graph_digest: str | None = dataclasses.field(default=None, repr=False, compare=False)
    stored_ids_digest: str | None = dataclasses.field(default=None, repr=False, compare=False)

    FORMAT: ClassVar[str]

    @property
    def graph_digest(self) -> str | None:
        """The digest of the graph this was selected from; computed on first use, which may take seconds."""
        return self.stored_graph_digest if self.graph is None else self.graph.digest

    @property
    def ids_digest(self) -> str | None:
        """A digest of the chosen ids in row order, since `graph_digest` is the same for rows in another order."""
        return self.stored_ids_digest if self.graph is None else _digest_ids(self.graph, self._selected_rows())

    @functools.cached_property
    def num_distinct(self) -> int:
        """The number of examples selected at least once."""
        return int(np.count_nonzero(self.copies))  # type: ignore[attr-defined]

    def check_graph(self, graph: AttributionGraph) -> None:
        """Raises CertificateMismatchError for a graph this was not selected from."""
        if graph is self.graph:
            return
        selected: Any = self
        same = "; pass the graph it was selected from"
        if graph.num_examples != selected.num_examples:
            other = f"a graph of {selected.num_examples} examples, not {graph.num_examples}{same}"
        elif self.graph_digest is not None and self.graph_digest != graph.digest:
            other = f"another graph (digest {self.graph_digest}, not {graph.digest}){same}"
        elif self.ids_digest is not None and self.ids_digest != _digest_ids(graph, self._selected_rows()):
            other = "the same examples in another row order; read them in the order they were selected in"
        else:
            return
        raise CertificateMismatchError(f"this {type(self).__name__} was made for {other}, or select again")

    def _bind(self, graph: AttributionGraph | None) -> Self:
        if graph is None:
            return self
        self.check_graph(graph)
        return dataclasses.replace(self, graph=graph)

    def _selected_rows(self) -> npt.NDArray[Any]:
        return np.flatnonzero(self.copies)  # type: ignore[attr-defined]

    def _encode(self, kind: type[_StoredOrigin], **arrays: npt.NDArray[Any] | None) -> str:
        """Returns the JSON text of a `kind`: these arrays, and what this has under the names of the other entries."""
        entries = {name: arrays[name] if name in arrays else getattr(self, name) for name in kind.__struct_fields__}
        if "user_bounds" in entries:
            bounds: Any = entries.pop("user_bounds")  # one bound for all is written as it always was
            entries |= {} if bounds is None else {"user_bounds": bounds.to_dict()}
        return encode_json(entries, format=self.FORMAT)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self) if field.compare]
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Selection(Selected):
    """The number of copies of each example in the training set S.

    Guarantees:
      - The arrays are read-only.   (test_arrays_are_read_only)
      - `from_json(to_json())` is equal to the original and refuses another graph.   (test_json_round_trip)
    What it is not: proof of a contribution bound; that is what `certify` recounts.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [2]])
      >>> selection = Selection.from_copies(graph, [2, 0, 1])
      >>> selection.size, selection.num_distinct
      (3, 2)
    """

    copies: npt.NDArray[np.int32]  # (num_examples,) how often each example is in S
    groups: npt.NDArray[np.int32] | None = None  # (num_examples,) group of each selected example, -1 elsewhere
    upper_bound: int | None = None  # proven bound on the size of any S under the same settings
    user_bounds: UserBounds | None = None  # those of single users, which `certify` recounts; None: one for all

    FORMAT: ClassVar[str] = "coowned-selection-2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", _counts(self.copies, "copies"))
        if self.graph is not None:
            validate.same_length(self.graph.num_examples, copies=self.copies)
        if self.groups is not None:
            object.__setattr__(self, "groups", _checked_groups(self.groups, self.copies))

    @classmethod
    def from_copies(cls, graph: AttributionGraph, copies: npt.ArrayLike, groups: npt.ArrayLike | None = None) -> Self:
        """Builds S from the number of copies of each example (and, if wanted, the group of each)."""
        check_is_graph(graph)
        own_groups = None if groups is None else np.array(groups)
        counts = np.array(copies)
        counts = counts.astype(np.int32) if counts.dtype == bool else counts  # a mask: each once
        return cls(graph=graph, copies=counts, groups=own_groups, selector={"name": "from-copies"})

    @property
    def num_examples(self) -> int:
        """Examples of the graph, selected or not."""
        return len(self.copies)

    @functools.cached_property
    def size(self) -> int:
        """The size of S, counting every copy."""
        return int(self.copies.sum(dtype=np.int64))

    def to_json(self) -> str:
        """Returns a JSON text that lists only what is selected."""
        rows = self._selected_rows()
        groups = None if self.groups is None else self.groups[rows]
        return self._encode(_StoredSelection, indices=rows, copies=self.copies[rows], groups=groups)

    @classmethod
    def from_json(cls, text: str, graph: AttributionGraph | None = None) -> Self:
        """Reads `to_json()` back; with a graph, refuses one that it was not made for."""
        stored = decode_json(_StoredSelection, text, name="selection", format=cls.FORMAT, remedy="select again")
        fields = stored.fields()
        rows, num_examples = np.array(fields.pop("indices"), np.int64), fields.pop("num_examples")
        if len(rows) and (rows[-1] >= num_examples or (np.diff(rows) <= 0).any()):
            raise InputError(f"indices must increase strictly within [0, {num_examples})")
        for name, elsewhere in (("copies", 0), ("groups", -1)):
            if fields[name] is not None:
                validate.same_length(len(rows), **{name: fields[name]})
                whole = np.full(num_examples, elsewhere, np.int64)
                whole[rows] = fields[name]
                fields[name] = whole
        if fields["user_bounds"] is not None:
            fields["user_bounds"] = UserBounds.from_dict(fields["user_bounds"])
        return cls(**fields)._bind(graph)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule(Selected):
    """The examples in each batch.

    Guarantees:
      - The arrays are read-only.   (test_arrays_are_read_only)
      - `from_json(to_json())` is equal to the original and refuses another graph.   (test_json_round_trip)
    What it is not: proof of a min separation; that is what `certify` recounts.

    Example:
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [2]])
      >>> schedule = Schedule.from_batches(graph, [[0, 2], [1, 2]])
      >>> schedule.iterations, schedule.batch_size, schedule.copies.tolist()
      (2, 2, [1, 1, 2])
    """

    batches: npt.NDArray[np.int32]  # (iterations, batch_size) example indices
    num_examples: int  # examples of the graph, scheduled or not
    min_separation: int | None = None  # as requested
    lower_bound: int | None = None  # proven bound on the contribution bound of any schedule under the same settings

    FORMAT: ClassVar[str] = "coowned-schedule-2"

    def __post_init__(self) -> None:
        batches = _integers(self.batches, "batches")
        if batches.ndim != 2:
            raise InputError(f"batches must have the shape (iterations, batch_size), not {batches.shape}")
        if batches.size and (batches.min() < 0 or batches.max() >= self.num_examples):
            raise InputError(f"batches must contain example indices in [0, {self.num_examples})")
        kind = np.int32 if self.num_examples <= 2**31 else np.int64
        object.__setattr__(self, "batches", _contiguous(batches.astype(kind, copy=False)))
        if self.graph is not None and self.graph.num_examples != self.num_examples:
            raise InputError(f"num_examples must be that of the graph ({self.graph.num_examples})")

    @classmethod
    def from_batches(cls, graph: AttributionGraph, batches: npt.ArrayLike) -> Self:
        """Builds a schedule from the example indices of each batch, shape (iterations, batch_size)."""
        check_is_graph(graph)
        try:
            slots = np.array(batches)
        except ValueError:
            raise InputError("batches must all have the same length") from None
        selector = {"name": "from-batches"}
        return cls(graph=graph, batches=slots, num_examples=graph.num_examples, selector=selector)

    @property
    def iterations(self) -> int:
        """Number of batches."""
        return self.batches.shape[0]

    @property
    def batch_size(self) -> int:
        """Examples in each batch."""
        return self.batches.shape[1]

    @property
    def size(self) -> int:
        """The number of slots: iterations times batch_size."""
        return self.batches.size

    @functools.cached_property
    def copies(self) -> npt.NDArray[np.int32]:
        """The number of times each example appears in the schedule, shape (num_examples,)."""
        return _contiguous(np.bincount(self.batches.ravel(), minlength=self.num_examples).astype(np.int32))

    def to_json(self) -> str:
        """Returns a JSON text with the examples of every batch."""
        return self._encode(_StoredSchedule, batches=self.batches)

    @classmethod
    def from_json(cls, text: str, graph: AttributionGraph | None = None) -> Self:
        """Reads `to_json()` back; with a graph, refuses one that it was not made for."""
        stored = decode_json(_StoredSchedule, text, name="schedule", format=cls.FORMAT, remedy="select again")
        fields = stored.fields()
        batches, batch_size = fields["batches"], fields.pop("batch_size")
        if any(len(batch) != batch_size for batch in batches):
            raise InputError(f"batches must all have batch_size={batch_size} entries")
        fields["batches"] = np.array(batches, np.int64).reshape(len(batches), batch_size)
        return cls(**fields)._bind(graph)


Result = TypeVar("Result", bound=Selection | Schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector(abc.ABC, Generic[Result]):
    """Base class of every selector: `select` checks its arguments, `_select` is the algorithm alone.

    A selector has its command-line name in `name` and its settings as fields, checked in `__post_init__`. A field that
    is `Annotated` with an `Option` is an option of `coowned select`.
    """

    name: ClassVar[str]
    bound_is_enough: ClassVar[bool] = False  # `contribution_bound` alone makes one, so that a plan can try it

    def select(self, graph: AttributionGraph, *, seed: int = 0, progress: Progress | None = None) -> Result:
        """Selects from the graph alone.

        Args:
          graph: who each example belongs to.
          seed: public; the same seed gives the same choice.
          progress: called now and then as progress(done, message), with `done` from 0 to 1. What it raises, and
            Ctrl-C, ends the selection.
        """
        check_is_graph(graph)
        validate.seed(seed)
        report = reporting(progress)
        self._check(graph)
        result = self._select(graph, int(seed), report)
        report(1.0, "selected")
        return result

    def settings(self) -> dict[str, Any]:
        """Returns the selector's name and fields, as a plain dict for JSON."""
        return {"name": self.name} | to_plain(dataclasses.asdict(self))

    def _check(self, graph: AttributionGraph) -> None:
        """Raises an error for a graph that the settings cannot be used on."""

    @abc.abstractmethod
    def _select(self, graph: AttributionGraph, seed: int, progress: Progress) -> Result:
        """Runs the algorithm; arguments have been checked, and `progress` is always callable."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedSelector(Selector[Result]):
    """Base class of the selectors that use the shared order (see `coowned.selection.order`).

    Args:
      ties: "hash" orders examples with equally many users by a keyed hash of their ids, "input" by their position.
      unattributed: what becomes of an example without users: "drop" leaves it out, "keep" takes it exactly once,
        "error" refuses the graph.
    """

    ties: Annotated[str, Option("Order of examples with equally many users: hash (default) or input.")] = "hash"
    unattributed: Annotated[str, Option("Examples without users: drop (default), keep or error.")] = "drop"

    def __post_init__(self) -> None:
        validate.one_of(("hash", "input"), ties=self.ties)
        validate.one_of(("drop", "keep", "error"), unattributed=self.unattributed)

    def _check(self, graph: AttributionGraph) -> None:
        if self.unattributed == "error" and graph.num_examples and graph.users_per_example.min() == 0:
            empty = np.flatnonzero(graph.users_per_example == 0)
            raise InputError(
                f"{counted(len(empty), 'example has', 'examples have')} no users (the first at index {empty[0]}); "
                'unattributed="drop" leaves out such examples, unattributed="keep" selects each once, protecting nobody'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedSelector(OrderedSelector[Selection]):
    """Base class of the selectors of sets in which no user exceeds their bound.

    Args:
      contribution_bound: of everybody who has no bound of their own.
      contribution_bounds: bounds of single users, by key: a mapping, a table or file with the columns user, bound and,
        for names of tiers, tier; a rule, asked for the bound of each key; or one integer for everybody. 0 takes all
        examples of a person out. Like S, bounds must not be chosen by looking at content.
    """

    contribution_bound: Annotated[int, Option("Largest number of selected copies that contain one user.", metavar="K")]
    contribution_bounds: Annotated[
        Bounds,
        Option(
            "File with the columns user, bound (and tier): bounds of single users, 0 to leave a user out.",
            metavar="FILE",
            flag="--contribution-bounds-file",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.integer(at_least=1, at_most=MOST_COPIES, contribution_bound=self.contribution_bound)
        given = self.contribution_bounds
        if given is None or callable(given):  # a rule is asked once the graph is known
            return
        if isinstance(given, int | np.integer):
            validate.integer(at_least=1, at_most=MOST_COPIES, contribution_bounds=given)
            object.__setattr__(self, "contribution_bound", int(given))
            object.__setattr__(self, "contribution_bounds", None)
        else:
            bounds = UserBounds.of(given, others=int(self.contribution_bound))
            object.__setattr__(self, "contribution_bounds", bounds)

    def select(self, graph: AttributionGraph, *, seed: int = 0, progress: Progress | None = None) -> Selection:
        """Selects from the graph alone; a rule is first evaluated for the bound of each user."""
        return super(BoundedSelector, self.for_graph(graph)).select(graph, seed=seed, progress=progress)

    def for_graph(self, graph: AttributionGraph) -> Self:
        """Returns this selector with a rule's answers in place of the rule."""
        check_is_graph(graph)
        if not callable(self.contribution_bounds):
            return self
        rule: Any = self.contribution_bounds
        bounds = UserBounds.of_rule(rule, graph, others=int(self.contribution_bound))
        return dataclasses.replace(self, contribution_bounds=bounds)

    def settings(self) -> dict[str, Any]:
        """Returns name and fields; bounds of single users by digest and number, without keys."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        bounds = fields.pop("contribution_bounds")
        if callable(bounds):
            raise InputError("contribution_bounds is a rule: its answers depend on the graph; call for_graph(graph)")
        return (
            {"name": self.name}
            | to_plain(fields)
            | ({} if bounds is None else {"contribution_bounds": bounds.settings()})
        )

    def capacities(self, graph: AttributionGraph) -> npt.NDArray[np.int32]:
        """Returns the most copies that each user may be in, shape (num_users,)."""
        if self.contribution_bounds is None:
            return np.full(graph.num_users, self.contribution_bound, np.int32)
        return self.contribution_bounds.of_users(graph)

    def _selection(self, graph: AttributionGraph, seed: int, copies: npt.NDArray[np.int32], **fields: Any) -> Selection:
        """Returns the selection of these copies and, if they are kept, of each example without users once."""
        if self.unattributed == "keep":
            copies[graph.users_per_example == 0] = 1
        optimal = int(copies.sum(dtype=np.int64)) == fields.get("upper_bound")
        fields = {"selector": self.settings(), "user_bounds": self.contribution_bounds} | fields
        return Selection(graph=graph, seed=seed, copies=copies, proven_optimal=optimal, **fields)


def check_is_graph(graph: Any) -> None:
    """Raises InputError for anything but an `AttributionGraph`."""
    if not isinstance(graph, AttributionGraph):
        raise InputError(f"graph must be an AttributionGraph, not {type(graph).__name__}")


def _equal(one: Any, other: Any) -> bool:
    arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return np.array_equal(one, other) if arrays else type(one) is type(other) and one == other


def _contiguous(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return read_only(np.ascontiguousarray(array))


def _integers(values: Any, name: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list has no type
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} must be integers, not {array.dtype}")
    return array


def _counts(values: Any, name: str) -> npt.NDArray[np.int32]:
    array = _integers(values, name)
    if array.ndim != 1:
        raise InputError(f"{name} must have one entry per example, not shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise InputError(f"{name} must be in [0, 2^31), not {array.min()} to {array.max()}")
    return _contiguous(array.astype(np.int32, copy=False))


def _checked_groups(values: Any, copies: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    groups = _integers(values, "groups")
    validate.same_length(len(copies), groups=groups)
    if ((groups >= 0) != (copies > 0)).any() or (groups < -1).any():
        raise InputError("groups must be at least 0 for every selected example and -1 for every other")
    return _contiguous(groups.astype(np.int32, copy=False))


def _digest_ids(graph: AttributionGraph, rows: npt.NDArray[Any]) -> str:
    ids = graph.example_ids
    if ids is None:
        return "index"
    offsets, data = utf8_buffers(ids.take(pa.array(rows)), length=len(rows))
    lengths = np.diff(offsets).astype("<i8")  # first, so that no two lists of ids give the same bytes
    return hashlib.sha256(lengths.tobytes() + data[offsets[0] : offsets[-1]].tobytes()).hexdigest()
