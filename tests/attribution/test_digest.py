"""The digest: equal on every platform, for every order, labelling and partition."""

import hashlib

import hypothesis.strategies as st
import numba
import numpy as np
import pytest
from hypothesis import given

from coowned import AttributionGraph
from coowned.attribution import digest as digests
from coowned.attribution.identifiers import utf8_buffers

FIVE_EMAILS = [[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2]]

names = st.text(st.characters(codec="utf-8"), max_size=40)  # some longer than what is copied at once


@st.composite
def named_graphs(draw):
    """Ids, keys and the users of each example."""
    ids = draw(st.lists(names, unique=True, max_size=8))
    keys = draw(st.lists(names, unique=True, min_size=1, max_size=5))
    users = [draw(st.lists(st.integers(0, len(keys) - 1), max_size=4)) for _ in ids]
    return ids, keys, users


@numba.njit
def compress_here(state, message, at):
    digests.compress(state, message, at)


def build(ids, keys, users):
    return AttributionGraph.from_users_per_example(users, num_users=len(keys), example_ids=ids, user_keys=keys)


def plain_sum(rows):
    lanes = [0, 0, 0, 0]
    for row in rows:
        value = hashlib.sha256(row).digest()
        lanes = [(lane + int.from_bytes(value[8 * i : 8 * i + 8], "big")) % 2**64 for i, lane in enumerate(lanes)]
    return lanes


def plain_digest(ids, keys, users):
    """The digest as its description says, with hashlib alone."""
    rows = []
    for example, row in zip(ids, users, strict=True):
        texts = [str(example).encode(), *sorted(str(keys[u]).encode() for u in set(row))]
        rows.append(b"example:" + b"".join(b"%d:%s" % (len(text), text) for text in texts))
    lines = ["coowned graph 2", f"{len(rows)} {' '.join(str(lane) for lane in plain_sum(rows))}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@given(named_graphs())
def test_digest_equals_plain_hashlib(parts):
    ids, keys, users = parts
    assert build(ids, keys, users).digest == plain_digest(ids, keys, users)


def test_digest_is_pinned():
    # Certificates out in the world hold such digests: they change only with digests.VERSION.
    graph = AttributionGraph.from_users_per_example(FIVE_EMAILS)
    assert graph.digest == plain_digest(range(5), range(4), FIVE_EMAILS)
    assert graph.digest == "9e8fdd4d14906afcc82e6324c3fddef6eb600342f480617fb1d5c6efc68d5ced"
    named = build(["m1", "m2"], ["ann@x.org", "böb@x.org"], [[0, 1], []])
    assert named.digest == "09a86f6d0f25ad1073d0328fb02b440e8612b483569961c0e141b997c5a4ae63"
    assert (
        AttributionGraph.from_users_per_example([]).digest
        == "d039408dd7da7d2c70bf9b12d8317ec6649c09d6bc5d6420847357ec001df453"
    )


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_kernel_is_sha256(messages):
    buffer, ends = np.zeros(400 * len(messages), np.uint8), [0]
    for message in messages:
        begin = ends[-1]
        buffer[begin : begin + len(message)] = np.frombuffer(message, np.uint8)
        ends.append(digests.pad(buffer, begin, begin + len(message)))
    sums = np.zeros(4, np.uint64)
    digests.add_hashes(buffer, np.array(ends), len(messages), sums)
    assert sums.tolist() == plain_sum(messages)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 7))
def test_any_processor_computes_the_same(block, at):
    """What processors without instructions for SHA-256 run, beside what this one runs, and hashlib."""
    message = np.frombuffer(bytes(at) + block + bytes(8), np.uint8)
    plain, chosen = digests.INITIAL_STATE.copy(), digests.INITIAL_STATE.copy()
    digests.compress_plainly(plain, message, at)
    compress_here(chosen, message, at)
    assert plain.tolist() == chosen.tolist()
    padding = np.frombuffer(b"\x80" + bytes(61) + b"\x02\x00", np.uint8)  # 512 bits
    digests.compress_plainly(plain, padding, 0)
    assert (
        b"".join(int(plain[i]).to_bytes(4, "big") for i in (3, 2, 7, 6, 1, 0, 5, 4)) == hashlib.sha256(block).digest()
    )


@given(named_graphs(), st.randoms(use_true_random=False))
def test_digest_can_be_merged(parts, random):
    ids, keys, users = parts
    graph = build(ids, keys, users)
    rows = list(range(len(ids)))
    random.shuffle(rows)
    cut = random.randint(0, len(rows))
    first, second = graph.subgraph(rows[:cut]).digest_sums(), graph.subgraph(rows[cut:]).digest_sums()
    assert first.merge(second) == graph.digest_sums()
    assert digests.finish("graph", first.merge(second)) == graph.digest


@pytest.mark.parametrize("rows", [1, 65_536, 65_537, 200_000])
def test_sums_do_not_depend_on_tasks(rows):
    # More rows than one task takes: the sums of the tasks are added in any order.
    ids = digests.Texts(*utf8_buffers(None, length=rows))
    numbers = np.arange(rows, dtype=np.int64)[:, None]
    whole = digests.sum_rows("copies", numbers, np.arange(rows), ids)
    halves = [
        digests.sum_rows("copies", numbers[part], np.arange(rows)[part], ids)
        for part in (slice(0, rows // 2), slice(rows // 2, rows))
    ]
    assert whole == halves[0].merge(halves[1])
    assert whole.count == rows
    if rows == 1:
        assert list(whole.lanes) == plain_sum([b"copies:0:0"])


def test_an_example_with_many_users():
    keys = [f"{'same beginning ' * (i % 3)}{i * 7919 % 3000}" for i in range(3000)]
    users = [list(range(3000)), [5], [2999, 0]]
    assert build(["a", "b", "c"], keys, users).digest == plain_digest(["a", "b", "c"], keys, users)


def test_long_ids():
    ids = ["x" * length for length in (0, 54, 55, 56, 63, 64, 65, 119, 120, 1000)]
    users = [[0]] * len(ids)
    assert build(ids, ["k" * 500], users).digest == plain_digest(ids, ["k" * 500], users)
