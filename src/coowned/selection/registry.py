"""The selectors by name: one name, one file, one class."""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coowned.selection.selector import Selector

CLASSES = {
    "greedy": "coowned.selection.greedy.Greedy",
    "greedy-with-duplicates": "coowned.selection.greedy_with_duplicates.GreedyWithDuplicates",
    "greedy-min-separation": "coowned.selection.greedy_min_separation.GreedyMinSeparation",
    "bias-mitigating": "coowned.selection.bias_mitigating.BiasMitigating",
    "random-subset": "coowned.selection.random_subset.RandomSubset",
    "integer-program": "coowned.selection.integer_program.IntegerProgram",
    "min-separation-program": "coowned.selection.min_separation_program.MinSeparationProgram",
    "priced": "coowned.selection.priced.Priced",
    "priced-min-separation": "coowned.selection.priced_min_separation.PricedMinSeparation",
    "cyclic-groups": "coowned.selection.cyclic_groups.CyclicGroups",
}
"""The dotted path of every selector's class by its word; importing none of them."""


def selector_class(word: str) -> "type[Selector]":
    """Imports and returns the selector class of this name; KeyError if there is none.

    Example:
      >>> selector_class("greedy").__name__
      'Greedy'
    """
    return pkgutil.resolve_name(CLASSES[word])
