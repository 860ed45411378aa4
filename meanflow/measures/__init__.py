"""Measures: networks as clouds of particles, data sets, teachers, sampling laws, quadrature."""

from meanflow.measures import laws as laws
from meanflow.measures import teachers as teachers
from meanflow.measures._cloud import Affine as Affine
from meanflow.measures._cloud import Cloud as Cloud
from meanflow.measures._cloud import Neurons as Neurons
from meanflow.measures._cloud import Polar as Polar
from meanflow.measures._dataset import Dataset as Dataset
from meanflow.measures._sampling import quadrature as quadrature
from meanflow.measures._sampling import sample as sample
