"""Report: one self-contained HTML page about a sweep."""

from meanflow.report.page import write_report as write_report
