"""Readers with one thing wrong, and the property test that must see each: one person's cell changes nobody else.

A property test that could not fail would promise nothing. Every bug here is one that somebody could write. It is
planted into the reader, and the test that must fail is the one that runs in the suite.
"""

import json
import re

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest
from tests.attribution import test_mail_boxes, test_user_keys
from tests.content import test_columns
from tests.selection import test_selection_files

from coowned.attribution import mail_boxes, sql, table_files, tables, user_keys
from coowned.content import columns, example_table


def widths_of_the_data(patch):
    """The length of the longest list becomes the width of its column."""
    read = test_columns.write_lists

    def planted(kind, folder, cells):
        found = read(kind, folder, cells)
        width = max(len(cell) for cell in cells if isinstance(cell, list))
        good = [
            cell if isinstance(cell, list) and len(cell) == width and all(isinstance(n, float) for n in cell) else None
            for cell in cells
        ]
        payload = found.payload.replace_schema_metadata().drop_columns("x")
        object.__setattr__(found, "payload", payload.append_column("x", pa.array(good, pa.list_(pa.float64(), width))))
        return found

    patch.setattr(test_columns, "write_lists", planted)


def types_of_the_cells(patch):
    """The type that cells gave to their column decides how all of them are read."""
    for module in (columns, example_table):
        patch.setattr(module, "types_are_inferred", lambda schema, *names: False)
    patch.setitem(table_files.READERS, "jsonl", lambda file, options: pyarrow.json.read_json(file))
    patch.setitem(table_files.READERS, "csv", lambda file, options: pyarrow.csv.read_csv(file))
    for module in (tables, sql):
        patch.setattr(module, "values_to_arrow", lambda values, text=None: _common_type(values, text))
    patch.setattr(test_columns, "everything_read", lambda payload: {"cells": payload.column("x").to_pylist()})


def _common_type(values, text):
    for kind in (pa.float64(), pa.string()) if text is None else (pa.string(),):
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, TypeError):
            continue
    return pa.array([None if value is None else json.dumps(value, default=str) for value in values], pa.string())


def messages_by_their_first_line(patch):
    """Whatever line begins with From and has a date begins a message, whether lengths were counted or not."""
    counted, split = mail_boxes.counted_end, mail_boxes.split_by_length

    def by_length(*arguments, **named):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(mail_boxes, "counted_end", counted)
            yield from list(split(*arguments, **named))

    def lines(content, start, dated):
        at = content.find(b"\n", mail_boxes.first_line(content, start))
        while (at := content.find(b"\nFrom ", at) + 1) > 0:
            if mail_boxes.is_dated(content, at):
                yield at, mail_boxes.Line.START

    patch.setattr(mail_boxes, "split_by_length", by_length)
    patch.setattr(mail_boxes, "counted_end", lambda content, start: None)
    patch.setattr(mail_boxes, "from_lines", lines)


def keys_by_the_first_spelling(patch):
    """A cell is a user as it is written first: who writes in another way is somebody else."""
    patch.setattr(user_keys.UserKeyRules, "canonical", lambda self, names: user_keys.pl.Series(names).str.strip_chars())


def keys_that_share_a_domain(patch):
    """What a column's cells have in common is cut off: one cell can change what that is."""
    canonical = user_keys.UserKeyRules.canonical

    def planted(self, names):
        found = canonical(self, names)
        domains = {re.sub(r".*@", "@", key) for key in found if "@" in key}
        return found.str.strip_suffix(domains.pop()) if len(domains) == 1 else found

    patch.setattr(user_keys.UserKeyRules, "canonical", planted)


def ids_of_the_cells_type(patch):
    """Ids are integers where all cells are, and text where one is not."""
    for module in (sql, table_files):
        patch.setattr(module, "with_names_as_text", lambda table, options: table)


PLANTED = [
    (widths_of_the_data, test_columns.test_one_cell_changes_no_shape_and_no_other_row, {"kind": "arrow"}),
    (widths_of_the_data, test_columns.test_one_cell_changes_no_shape_and_no_other_row, {"kind": "jsonl"}),
    *((types_of_the_cells, test_columns.test_one_cell_changes_no_other, {"kind": kind}) for kind in test_columns.KINDS),
    (messages_by_their_first_line, test_mail_boxes.test_a_body_makes_no_message, {"dialect": "mboxcl2"}),
    (keys_by_the_first_spelling, test_user_keys.test_no_way_of_writing_splits_a_person, {}),
    (keys_that_share_a_domain, test_user_keys.test_one_spelling_changes_no_other_row, {}),
    *((ids_of_the_cells_type, test_selection_files.test_one_cell_changes_the_type_of_no_id, {"kind": kind})
      for kind in ("jsonl", "sql")),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "test", "arguments"),
    PLANTED,
    ids=[f"{plant.__name__}-{next(iter(arguments.values()), 'all')}" for plant, _, arguments in PLANTED],
)
def test_the_bug_is_seen(plant, test, arguments, monkeypatch, tmp_path):
    plant(monkeypatch)
    if plant is widths_of_the_data:
        arguments = {**arguments, "tmp_path": tmp_path}
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test(**arguments)
