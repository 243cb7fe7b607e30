"""Launching: a sweep file becomes jobs, jobs become records. Importing it never imports torch."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # holds jobs, systems and the stock sweeps
