"""The odd point of a batch."""

import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import depth


def test_odd_points_of_several_batches_by_hand():
    """Each batch has its own odd sample; angles and ratios are those of the vectors."""
    x = np.array(
        [
            [[0.0, 0.0, 8.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]],
            [[1.0, 0.0, 0.0], [3.0, 3.0, 0.0], [0.0, 2.0, 0.0]],
        ]
    )
    odd = depth.Gram(x @ x.transpose(0, 2, 1)).odd_point(threshold=3.0)
    assert odd.sample.tolist() == [0, 1] and odd.escaped.tolist() == [True, False]
    np.testing.assert_allclose(odd.norm_ratio, [4.0, 3 / np.sqrt(2)], rtol=1e-14)
    np.testing.assert_allclose(odd.odd_angle, [90.0, 45.0], rtol=1e-12)
    np.testing.assert_allclose(odd.cluster_angle, [45.0, 90.0], rtol=1e-12)


def test_odd_point_arguments():
    with pytest.raises(ValueError, match="at least 3"):
        depth.Gram(jnp.eye(2)).odd_point()
    with pytest.raises(ValueError, match="at least 3"):
        depth.Gram(jnp.diag(jnp.array([1.0, 0.0, 0.0]))).odd_point()
