"""What random normalized layers do to a batch: rank, angles, the tree model, infinite-width maps."""

from meanflow.depth.expected import expected_gram as expected_gram
from meanflow.depth.invariant import invariant_representation as invariant_representation
from meanflow.depth.observables import pair_angles as pair_angles
from meanflow.depth.odd_points import odd_point as odd_point
from meanflow.depth.propagation import propagate as propagate
from meanflow.depth.rank import gamma as gamma
from meanflow.depth.rank import rank_bounds as rank_bounds
from meanflow.depth.tree_model import tree as tree
