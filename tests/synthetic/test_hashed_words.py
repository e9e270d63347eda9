import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coowned.synthetic.hashed_words import hashed_words


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.integers(1, 32))
def test_a_row_depends_on_its_text_alone(texts, num_features):
    rows = hashed_words(texts, num_features)
    for text, row in zip(texts, rows, strict=True):
        np.testing.assert_array_equal(hashed_words([text], num_features)[0], row)
        assert np.linalg.norm(row) <= 1 + 1e-6


def test_other_words_are_other_rows():
    assert not np.array_equal(*hashed_words(["knee surgery", "budget report"], 64))
