"""Report: one self-contained HTML page about a sweep."""

from meanflow.report._page import write_report as write_report
