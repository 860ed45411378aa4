"""Benchmarks: each function measures ours and its peers in one run and returns a dict of numbers.

Times are the best of several runs of compiled code, blocked until ready; compilation is reported apart.
Compare them as ratios within one run only.
"""

from meanflow_benchmarks.timing import best_time as best_time
