"""Selection by trying every S, for small graphs."""

import itertools

import numpy as np

from coowned.testing.selector_checks import copies_per_user


def every_selection(graph, capacities, most_copies):
    """Yields the (num_examples,) copies of every S within the users' capacities that has no unattributed examples."""
    examples = np.flatnonzero(graph.users_per_example)
    for counts in itertools.product(range(most_copies + 1), repeat=len(examples)):
        copies = np.zeros(graph.num_examples, np.int64)
        copies[examples] = counts
        if (copies_per_user(graph, copies) <= capacities).all():
            yield copies


def largest(graph, capacities, most_copies):
    """Returns the size of the largest S."""
    return max(int(copies.sum()) for copies in every_selection(graph, capacities, most_copies))
