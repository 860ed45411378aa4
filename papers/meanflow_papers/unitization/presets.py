"""How ResNets are trained on CIFAR: after the text of the paper, and after the training code its authors released.

The text leaves much open, and the released code (Keras, linked in section 4.2) differs from what one reads there:

- weight decay is a Keras penalty 5e-4 |w|^2 of the kernels alone: its gradient is 2 * 5e-4 w, and nothing else decays;
- the variance is Bessel-corrected: in unitization for the batch and for the running average, in batch norm for the
  running average alone; epsilon is 1e-3 and the momentum of the running averages 0.99, which are Keras's defaults;
- convolutions have biases, shortcuts that change the shape are 1 x 1 convolutions of the block's input, and the stem is
  normalized too;
- images are centered for each pixel and then divided by the *variance* (of values from 0 to 255), so that inputs have
  the size 1/64 instead of 1, and the epsilon above is felt in the stem;
- images are moved by up to an eighth of their size, not by whole pixels;
- the rate falls after 61, 121 and 161 epochs, one later than the text says.

Two details are not followed: the released loop has a last, smaller minibatch in each epoch, which is dropped here, and
its two methods start from weights of the same seed, as ours do, but from another generator.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree

from meanflow.layers import BatchNorm, UnitizedBatchNorm
from meanflow.training.data import Data, crop_and_flip

MakeNorm = Callable[..., nnx.Module]
"""Builds a normalization layer: (features, rngs=...) -> layer."""


@dataclass(frozen=True)
class Preset:
    """One way to train the networks of Tables 1, 2 and 4 and of Figure 3.

    Attributes:
        norms: the normalization layers that are compared, by name.
        optimizer: (number of minibatches in all) -> optimizer.
        augment: (key, images) -> images.
        prepare: what happens to the images before training; they come with values from 0 to 1.
        released: whether the network is that of the released code.
    """

    norms: dict[str, MakeNorm]
    optimizer: Callable[[int], optax.GradientTransformation]
    augment: Callable[[jax.Array, jax.Array], jax.Array]
    prepare: Callable[[Data], Data]
    released: bool


class BesselUnitized(UnitizedBatchNorm):
    """Unitization with the variance of the released code, n/(n - 1) times that of the batch, in training too."""

    def given_moments(self, x: Float[Array, "*shape"]) -> tuple[Array, Array]:
        """Return mean and corrected variance of the batch, and enter them into the running averages."""
        axes = tuple(i for i in range(x.ndim) if i not in self._feature_axes(x))
        mean = jnp.mean(x, axes, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
        count = float(np.prod([x.shape[i] for i in axes]))
        corrected = variance * (count / (count - 1))
        self._update(x, None, axes, mean, corrected)
        return mean, corrected


def kernels(params: PyTree[Array]) -> PyTree[bool]:
    """Mark the weights of convolutions and of the read-out, not biases, gammas, betas and alphas."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(part, "key", None) == "kernel" for part in path), params
    )


def over_variance(data: Data) -> Data:
    """Center each pixel over the training images and divide it by its variance, with values from 0 to 255."""
    mean, variance = data.train_x.mean(0), data.train_x.var(0) * 255
    put = lambda x: ((x - mean[None]) / variance[None]).astype(x.dtype)
    return data._replace(train_x=put(data.train_x), test_x=put(data.test_x))


def shift_and_flip(
    key: Key[Array, ""], images: Float[Array, "n h w c"], share: float = 0.125
) -> Float[Array, "n h w c"]:
    """Move each image by up to ``share`` of its size, linearly between pixels, zeros beyond; mirror half of them."""
    shift_key, flip_key = jax.random.split(key)
    n = len(images)
    for axis in (1, 2):
        size = images.shape[axis]
        shift_key, use = jax.random.split(shift_key)
        places = jnp.arange(size)[None] + jax.random.uniform(use, (n, 1), minval=-share, maxval=share) * size
        # row i of an image's matrix has the weights of the old pixels in the new pixel i
        tent = jnp.maximum(0, 1 - jnp.abs(places[:, :, None] - jnp.arange(size)[None, None]))
        images = jnp.moveaxis(jnp.einsum("nij,nj...->ni...", tent, jnp.moveaxis(images, axis, 1)), 1, axis)
    mirror = jax.random.bernoulli(flip_key, 0.5, (n, 1, 1, 1))
    return jnp.where(mirror, images[:, :, ::-1], images)


def staircase(
    learning_rate: float, epochs: int, steps: int, *, at: Iterable[float] = (0.3, 0.6, 0.8)
) -> optax.Schedule:
    """Return a schedule that divides the learning rate by 5 at given fractions of the training.

    Args:
        learning_rate: initial learning rate.
        epochs: number of epochs of the whole training.
        steps: number of minibatches in an epoch.
        at: fractions of the epochs at which the learning rate falls.

    >>> [round(float(staircase(0.05, 10, 1)(t)), 6) for t in (2, 3, 6, 8)]
    [0.05, 0.01, 0.002, 0.0004]
    """
    # a schedule drops when the count reaches the boundary, that is from the first step of epoch f * epochs
    return optax.piecewise_constant_schedule(learning_rate, {round(f * epochs) * steps: 1 / 5 for f in at})


def _descent(schedule: optax.Schedule, decay: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(decay, optax.sgd(schedule, momentum=0.9, nesterov=True))


PRESETS = {
    "paper": Preset(
        {
            "BN": partial(BatchNorm, momentum=0.9),
            "unitization": partial(UnitizedBatchNorm, momentum=0.9, n="pixels"),
        },
        lambda minibatches: _descent(staircase(0.05, minibatches, 1), optax.add_decayed_weights(5e-4)),
        crop_and_flip,
        lambda data: data,
        False,
    ),
    "released": Preset(
        {
            "BN": partial(BatchNorm, epsilon=1e-3, unbiased=True),
            "unitization": partial(BesselUnitized, epsilon=1e-3, n="pixels"),
        },
        lambda minibatches: _descent(
            staircase(0.05, minibatches, 1, at=(61 / 200, 121 / 200, 161 / 200)),
            optax.add_decayed_weights(2 * 5e-4, mask=kernels),
        ),
        shift_and_flip,
        over_variance,
        True,
    ),
}
