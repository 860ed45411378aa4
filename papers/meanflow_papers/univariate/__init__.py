"""Paper 004: gradient dynamics of univariate ReLU networks."""

from meanflow_papers.univariate import alignment as alignment
from meanflow_papers.univariate import courses as courses
from meanflow_papers.univariate import figure_1 as figure_1
from meanflow_papers.univariate import figure_2 as figure_2
from meanflow_papers.univariate import figure_3 as figure_3
from meanflow_papers.univariate import figure_4 as figure_4
from meanflow_papers.univariate import figure_5 as figure_5
from meanflow_papers.univariate import figure_5_map as figure_5_map
from meanflow_papers.univariate import figure_6 as figure_6
from meanflow_papers.univariate import figure_7 as figure_7
from meanflow_papers.univariate import figure_8 as figure_8
from meanflow_papers.univariate import figure_9 as figure_9
from meanflow_papers.univariate import lazy_slopes as lazy_slopes
from meanflow_papers.univariate import lemma_2 as lemma_2
from meanflow_papers.univariate import pictures as pictures
from meanflow_papers.univariate import proposition_1 as proposition_1
from meanflow_papers.univariate import proposition_4 as proposition_4
from meanflow_papers.univariate import section_3_1 as section_3_1
from meanflow_papers.univariate import setup as setup
from meanflow_papers.univariate import sparse_limit as sparse_limit
from meanflow_papers.univariate import theorem_5 as theorem_5
