"""Hypothesis strategies for attribution graphs: small and odd ones, for tests of anything that takes a graph."""

from coowned.attribution.graph import AttributionGraph

try:
    from hypothesis import strategies as st
except ImportError as error:  # a development dependency
    raise ImportError("coowned.testing.strategies needs hypothesis; install the extra coowned[dev]") from error


@st.composite
def attribution_graphs(
    draw: st.DrawFn,
    *,
    max_examples: int = 12,
    max_users: int = 8,
    min_users_per_example: int = 0,
    max_users_per_example: int = 4,
    with_ids: bool = True,
) -> AttributionGraph:
    """Generates graphs with examples without users, users without examples, repeated user sets and every kind of id.

    Example:
      >>> from hypothesis import find
      >>> find(attribution_graphs(), lambda graph: graph.num_pairs >= 2).num_pairs
      2
    """
    num_users = draw(st.integers(min_users_per_example, max_users))
    most = min(num_users, max_users_per_example)
    user = st.integers(0, max(num_users - 1, 0))
    row = st.lists(user, min_size=min_users_per_example, max_size=most, unique=True)
    rows = draw(st.lists(row, max_size=max_examples))
    if rows and draw(st.booleans()):
        rows += [rows[0]] * draw(st.integers(0, 3))  # repeated hyperedges
    ids = draw(example_ids(len(rows))) if with_ids else None
    return AttributionGraph.from_users_per_example(rows, num_users=num_users, example_ids=ids)


@st.composite
def example_ids(draw: st.DrawFn, length: int) -> list[int | str] | None:
    """Generates no ids, integers of any size, or text of any length in any script."""
    number = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 200)
    text = st.text(st.characters(codec="utf-8"), max_size=70)
    kind = draw(st.sampled_from([None, number, text]))
    return None if kind is None else draw(st.lists(kind, min_size=length, max_size=length, unique=True))
