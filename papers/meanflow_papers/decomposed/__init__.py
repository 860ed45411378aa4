"""Paper 002: batch norm decomposed into recentering, rescaling and the non-linearity."""

from meanflow_papers.decomposed import corollary_4 as corollary_4
from meanflow_papers.decomposed import figure_2 as figure_2
from meanflow_papers.decomposed import figure_3 as figure_3
from meanflow_papers.decomposed import figure_5 as figure_5
from meanflow_papers.decomposed import figure_6 as figure_6
from meanflow_papers.decomposed import lemma_2 as lemma_2
from meanflow_papers.decomposed import linear as linear
from meanflow_papers.decomposed import odd_states as odd_states
from meanflow_papers.decomposed import one_neuron as one_neuron
from meanflow_papers.decomposed import setup as setup
from meanflow_papers.decomposed import theorem_3 as theorem_3
from meanflow_papers.decomposed import theorem_10 as theorem_10
from meanflow_papers.decomposed import theorem_11 as theorem_11
from meanflow_papers.decomposed import theorems_13_14 as theorems_13_14
from meanflow_papers.decomposed import tree as tree
from meanflow_papers.entry import DIAGRAM, not_run

not_run("002/figure-1", title="diagram of the contribution", reason=DIAGRAM)
