"""What random normalized layers do to a batch: rank, angles, infinite-width maps."""

from meanflow.depth._expected import expected_gram as expected_gram
from meanflow.depth._gram import Gram as Gram
from meanflow.depth._propagation import Layer as Layer
from meanflow.depth._propagation import propagate as propagate
