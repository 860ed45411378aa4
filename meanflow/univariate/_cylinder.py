"""The flat cylinder of reduced neurons (r, theta): the geometry of the canonical flow."""

import jax

from meanflow._numerics import wrap_angle
from meanflow.geometry._space import Space
from meanflow.measures._cloud import Cloud, Polar


class Cylinder(Space):
    """The cylinder R x circle with coordinates (r, theta) and the flat metric dr^2 + dtheta^2."""

    def cylinder(self, height: jax.Array, angle: jax.Array) -> Polar:
        """Return the same coordinates, r = height and theta = angle."""
        return Polar(height, angle)

    def log(self, cloud: Cloud, particles: Polar) -> Polar:
        """Return the difference of coordinates from the cloud to ``particles``, the short way round the circle."""
        r, theta = cloud.particles
        return Polar(particles.r - r, wrap_angle(particles.theta - theta))
