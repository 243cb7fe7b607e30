"""Runs with several ranks: coordination of the nodes of a job, and one outcome of all ranks."""
