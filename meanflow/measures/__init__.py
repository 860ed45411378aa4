"""Measures: networks as clouds of particles, data sets, teachers, sampling laws, quadrature."""

from meanflow.measures import laws as laws
from meanflow.measures import teachers as teachers
from meanflow.measures.cloud import Affine as Affine
from meanflow.measures.cloud import BatchNormNeurons as BatchNormNeurons
from meanflow.measures.cloud import Cloud as Cloud
from meanflow.measures.cloud import Neurons as Neurons
from meanflow.measures.cloud import Polar as Polar
from meanflow.measures.cloud import stack as stack
from meanflow.measures.dataset import Dataset as Dataset
from meanflow.measures.sampling import quadrature as quadrature
from meanflow.measures.sampling import quasi as quasi
from meanflow.measures.sampling import resample as resample
from meanflow.measures.sampling import sample as sample
