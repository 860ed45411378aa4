"""The residual equation of univariate ReLU networks: predictions move by one 2 x 2 covariance for each region."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow._boundary import checked
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.univariate import _forces as forces
from meanflow.univariate._features import Univariate


def region_covariances(flow: Flow, cloud: Cloud, x: Float[Array, " s"]) -> Float[Array, "regions 2 2"]:
    """Return Sigma_R = sum_{i in R} p_i J_q C J_q' for each of the 2s regions: the covariances of Proposition 1.

    J_q is the derivative of the slope vector q of a neuron and C the inverse metric of the flow; on the cylinder
    J_q C J_q' = r^2 t t' + d d'. O(m log s).

    Args:
        flow: a univariate flow.
        cloud: its neurons.
        x: sorted samples.
    """
    feature = flow.feature
    assert isinstance(feature, Univariate)
    mobility = jnp.stack(feature.responses(cloud, flow.space), axis=-1) * cloud.weights[:, None, None]
    regions = forces.find_regions(feature.direction(cloud), x)
    return jax.ops.segment_sum(mobility, regions, 2 * x.shape[0])


@checked
def residual_ode(flow: Flow, cloud: Cloud, data: Dataset) -> Float[Array, " s"]:
    """Return the rate df/dt of the predictions at the samples by Proposition 1, eq. (13), in mean-field time.

    At sample j it is -x~_j' sum_{R active at j} Sigma_R G_R with x~ = (x, 1). This equals -K (q l'(f)) with K the
    tangent kernel, but takes O(m log s + s): only 2s covariances of size 2 x 2 enter.

    Args:
        flow: any univariate flow.
        cloud: its neurons.
        data: training data of s samples.

    >>> import meanflow as mf
    >>> flow, data = mf.canonical(), mf.Dataset(jnp.linspace(-1.0, 1.0, 3), jnp.array([1.0, -1.0, 1.0]))
    >>> cloud = flow.init(jax.random.key(0), 50)
    >>> rate = residual_ode(flow, cloud, data)
    >>> force = data.weights * (mf.predict(flow, cloud, data.x) - data.y)
    >>> bool(jnp.allclose(rate, -mf.tangent_kernel(flow, cloud, data.x) @ force, rtol=1e-4))
    True
    """
    if not isinstance(flow.feature, Univariate):
        given = type(flow.feature).__name__
        raise ValueError(
            f"flow must be a flow of univariate ReLU neurons (mf.univariate), got a feature {given}"
        )
    flow.check(cloud, data.x)
    order = jnp.argsort(data.x)
    x = data.x[order]
    f, _ = flow.feature.linearize(cloud, data.x)
    slope = (data.weights * flow.loss.slope(f, data.y))[order]
    table = forces.region_forces(slope, x)
    # the slopes of the neurons in R move at the rate -Sigma_R G_R; predictions are sums of slopes over active regions
    flux = jnp.einsum("rij,rj->ri", region_covariances(flow, cloud, x), table)
    rate = -forces.region_predictions(jnp.arange(2 * x.shape[0]), flux, x)
    return jnp.zeros_like(rate).at[order].set(rate)
