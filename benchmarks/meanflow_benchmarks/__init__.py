"""Benchmarks of meanflow: each function measures the library and its peers in one run and returns numbers by name.

A time is the best of several runs of compiled code, measured until the result is ready; compilation is reported apart.
Machines differ, so compare times as ratios within one run only. ``meanflow bench --list`` names the benchmarks.
"""

from meanflow_benchmarks.timing import best_time as best_time
