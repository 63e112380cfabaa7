"""The report: one HTML page of a trace and its trees, with everything it needs inside."""

from treeopt.report.page import ReportInputs, report_page
from treeopt.report.tree_picture import ShownTree

__all__ = ["ReportInputs", "ShownTree", "report_page"]
