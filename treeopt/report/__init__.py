"""The report: one HTML page of a trace and its trees, with everything it needs inside."""

from treeopt.report.page import ReportInputs, report_page

__all__ = ["ReportInputs", "report_page"]
