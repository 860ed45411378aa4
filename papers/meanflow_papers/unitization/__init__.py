"""Paper 003: bounding internal covariate shift by unitization. Digits stand in for MNIST and CIFAR where stated."""

from meanflow_papers.entry import DIAGRAM, not_run
from meanflow_papers.unitization import algorithm_3 as algorithm_3
from meanflow_papers.unitization import bounds as bounds
from meanflow_papers.unitization import cifar as cifar
from meanflow_papers.unitization import corrected as corrected
from meanflow_papers.unitization import dense as dense
from meanflow_papers.unitization import figure_2 as figure_2
from meanflow_papers.unitization import figure_3 as figure_3
from meanflow_papers.unitization import figure_3_layers as figure_3_layers
from meanflow_papers.unitization import imagenet as imagenet
from meanflow_papers.unitization import presets as presets
from meanflow_papers.unitization import table_4 as table_4
from meanflow_papers.unitization import tables_1_2 as tables_1_2
from meanflow_papers.unitization import theorems as theorems

not_run("003/figure-1", title="diagram of the statistics", reason=DIAGRAM)
