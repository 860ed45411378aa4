"""Paper 001: batch norm as a Riemannian metric."""

from meanflow_papers.manifold import figure_1 as figure_1
from meanflow_papers.manifold import figure_2 as figure_2
from meanflow_papers.manifold import figure_3 as figure_3
from meanflow_papers.manifold import learning_rates as learning_rates
from meanflow_papers.manifold import mnist as mnist
from meanflow_papers.manifold import proposition_1 as proposition_1
from meanflow_papers.manifold import setup as setup
from meanflow_papers.manifold import theorem_3 as theorem_3
from meanflow_papers.manifold import theorem_4 as theorem_4
from meanflow_papers.manifold import theorem_5 as theorem_5
