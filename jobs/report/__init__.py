"""Reports of results folders: tables, plots, comparisons, and a table for pandas.

from jobs.report import load
runs = load("logs/flash")
"""

from jobs.frame import load

__all__ = ["load"]
