"""Execution of a run on the nodes of a job, and one outcome of all its ranks."""
