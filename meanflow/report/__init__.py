"""Report: one self-contained HTML page about a sweep, and the gallery of reproduced figures."""

from meanflow.report.gallery import write_gallery as write_gallery
from meanflow.report.page import contents as contents
from meanflow.report.page import write_report as write_report
