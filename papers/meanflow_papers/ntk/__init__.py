"""Paper 000: tangent kernels under batch norm, and spectral bias of coordinate networks."""

from meanflow_papers.entry import not_run
from meanflow_papers.ntk import coordinate as coordinate
from meanflow_papers.ntk import coordinate_kernels as coordinate_kernels
from meanflow_papers.ntk import image as image
from meanflow_papers.ntk import lazy as lazy
from meanflow_papers.ntk import networks as networks
from meanflow_papers.ntk import predictions as predictions
from meanflow_papers.ntk import printed_kernel as printed_kernel
from meanflow_papers.ntk import spectral_bias as spectral_bias
from meanflow_papers.ntk import table_2 as table_2
from meanflow_papers.ntk import width as width

not_run("000/table-1", title="notation", reason="a table of symbols: nothing is measured in it")
