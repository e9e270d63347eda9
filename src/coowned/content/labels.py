"""Labels of a classification: classes are declared, never collected from the data, since labels are content."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from coowned import validate
from coowned.attribution.identifiers import is_text
from coowned.attribution.tables import spelled, types_are_inferred
from coowned.content.columns import check_number_columns, column_type, numbers
from coowned.errors import InputError

pc: Any = pyarrow.compute  # its functions are made when it is imported: no checker sees them

Classes = int | Sequence[str | int]
"""How many there are (0, 1, ...), or their names in the order of their indices, as the data spell them."""


def declared_classes(classes: Classes) -> tuple[str | int, ...]:
    """Returns the names of the classes; raises InputError for fewer than two, duplicates, or mixed types.

    >>> declared_classes(3), declared_classes(["spam", "ham"])
    ((0, 1, 2), ('spam', 'ham'))
    """
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        validate.integer(at_least=2, classes=classes)
        return tuple(range(int(classes)))
    names = tuple(classes)
    texts = [isinstance(name, str) for name in names]
    whole = [isinstance(name, int) and not isinstance(name, bool) for name in names]
    if len(set(names)) != len(names) or len(names) < 2 or not (all(texts) or all(whole)):
        raise InputError(
            f"classes must be two or more different texts or integers, or how many there are, not {classes!r}"
        )
    return names


def check_label_column(schema: pa.Schema, label: str | None, classes: Sequence[str | int] | None) -> None:
    """Raises InputError for a column that is missing or whose declared type cannot hold these classes.

    Without a label there is no column to check; without classes labels are numbers.
    """
    if label is None:
        return
    if classes is None:
        check_number_columns(schema, [label])
        return
    kind = column_type(schema, label)
    if types_are_inferred(schema, label):
        return
    if is_text(kind) and not isinstance(classes[0], str):
        raise InputError(
            f'column {label!r} holds text: declare its classes, classes = ["...", "..."]; collecting them from '
            "the data would reveal them"
        )
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (is_text(kind) or (number and not isinstance(classes[0], str)) or pa.types.is_null(kind)):
        raise InputError(
            f"column {label!r} holds {kind}, and classes are {list(classes)}; declare them as the data spell them"
        )


def read_labels(payload: pa.Table, label: str | None, classes: Sequence[str | int] | None) -> npt.NDArray[np.float32]:
    """Returns each label's (rows,) class index, or the label itself in a regression; NaN without a label column."""
    check_label_column(payload.schema, label, classes)
    if label is None:
        return np.full(len(payload), np.nan, np.float32)
    column = payload.column(label)
    return numbers(column) if classes is None else class_indices(column, classes)


def class_indices(column: pa.ChunkedArray, classes: Sequence[str | int]) -> npt.NDArray[np.float32]:
    """Returns the (rows,) class index of each label; NaN if it is none of the classes: its row has no influence.

    Guarantees:
      - A label depends on its own cell alone.   (test_labels_depend_on_their_own_cell)

    >>> class_indices(pa.chunked_array([["ham", "eggs", None, "spam"]]), ["spam", "ham"])
    array([ 1., nan, nan,  0.], dtype=float32)
    >>> class_indices(pa.chunked_array([[True, False]]), (0, 1)), class_indices(pa.chunked_array([[7.0, 7.5]]), [3, 7])
    (array([1., 0.], dtype=float32), array([ 1., nan], dtype=float32))
    """
    if isinstance(classes[0], str):
        names, cells = pa.array(classes, pa.large_string()), spelled(column)
    else:
        names, cells = pa.array(classes, pa.float64()), pa.array(numbers(column, dtype=np.float64))
    found = pc.index_in(cells, value_set=names).cast(pa.float32())
    return np.array(found.fill_null(float("nan")), np.float32)
