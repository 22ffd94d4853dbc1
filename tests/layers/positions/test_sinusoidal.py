import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers.positions.sinusoidal import sinusoidal


@pytest.mark.first(1)
def test_sinusoidal_by_hand(variant):
    got = variant(lambda positions: sinusoidal(positions, 4))(jnp.array([[0, 1, 50]]))
    # The wavelengths are 2 pi and 2 pi * 100. Sines come first.
    expected = [[np.sin(p), np.sin(p / 100), np.cos(p), np.cos(p / 100)] for p in (0, 1, 50)]
    np.testing.assert_allclose(got[0], expected, atol=1e-5)  # float32 sines of angles up to 50
