"""Helpers for the tests of sources: what was attributed to whom, and text that is not valid."""

import pyarrow as pa


def users_of(examples):
    """Returns the set of user keys of each example."""
    graph, keys = examples.graph, examples.user_keys.to_pylist()
    return [{keys[user] for user in graph.users[a:b]} for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True)]


def invalid_text(values):
    """Returns bytes as a string array without checking them, which breaks Arrow's rules."""
    return pa.array(values, pa.binary()).view(pa.string())
