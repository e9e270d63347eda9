"""Names for places in a source, so that an error says in which file, and in which row of it, something is wrong."""

import bisect
from collections.abc import Sequence


class Place:
    """What to call a source, and the file that each of its rows came from.

    Args:
      name: the source, as the person named it; empty for a table in memory.
      files: for a folder, each file and the number of its rows, in order.

    Example:
      >>> place = Place("mail", [("mail/a.csv", 10), ("mail/b.csv", 5)])
      >>> f"{place}no user at {place.row(12)}"
      'mail: no user at row 2 of mail/b.csv'
      >>> f"{Place()}no user at {Place().row(12)}"
      'no user at row 12'
    """

    def __init__(self, name: str = "", files: Sequence[tuple[str, int]] = ()):
        self.name = name
        self.files = [file for file, _ in files]
        self.begins = [0]
        for _, rows in files:
            self.begins.append(self.begins[-1] + rows)

    def __str__(self) -> str:
        return f"{self.name}: " if self.name else ""

    def row(self, number: int) -> str:
        """Row `number` of the source, counted from 0 in its own file."""
        if len(self.files) < 2:
            return f"row {number}"
        file = bisect.bisect_right(self.begins, number) - 1
        return f"row {number - self.begins[file]} of {self.files[file]}"
