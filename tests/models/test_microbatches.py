import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coowned.models.microbatches import gradient_sum, in_parts, over_parts


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("count", "parts", "size"), [(0, 1, 1), (1, 1, 1), (8, 1, 8), (9, 2, 5), (40, 5, 8)])
def test_every_row_is_in_one_microbatch(count, parts, size, spread):
    """And microbatches are about the same size, so that little is spent on padding."""
    rows = np.arange(1, count + 1)
    of_part, found_parts = in_parts({"rows": rows}, 8, spread=spread)
    assert found_parts == parts
    found = [np.asarray(of_part(part)["rows"]) for part in range(parts)]
    assert [part.shape for part in found] == [(size,)] * parts
    assert sorted(np.concatenate(found).tolist()) == [0] * (parts * size - count) + rows.tolist()


def test_spread_parts_have_rows_of_every_half():
    """A batch whose halves lie on two devices keeps both of them busy in every part."""
    of_part, parts = in_parts(np.arange(40), 8, spread=True)
    halves = [np.bincount(np.asarray(of_part(part)) // 20).tolist() for part in range(parts)]
    assert halves == [[4, 4]] * 5


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("count", [0, 9, 40])
def test_rows_keep_their_order(count, spread):
    rows = {"x": np.arange(3 * count, dtype=np.float32).reshape(count, 3), "y": np.arange(count)}
    function = jax.jit(
        lambda rows: over_parts(lambda part: (2 * part["x"], part["x"].sum(axis=1) + part["y"]), rows, 8, spread=spread)
    )
    doubled, summed = function(rows)
    np.testing.assert_array_equal(doubled, 2 * rows["x"])
    np.testing.assert_array_equal(summed, rows["x"].sum(axis=1) + rows["y"])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("count", [0, 9, 40])
def test_gradients_of_parts_add_up(count, spread):
    rows = {"x": np.arange(count, dtype=np.float32), "real": np.arange(count) != 3}

    def loss(parameters, part):
        return jnp.where(part["real"], parameters["w"] * part["x"] + parameters["w"] ** 2, 0).sum()

    own = {"w": jnp.float32(2)}
    found = jax.jit(lambda own, rows: gradient_sum(loss, own, rows, 8, spread=spread))(own, rows)
    assert float(found["w"]) == (rows["x"] + 4)[rows["real"]].sum()
