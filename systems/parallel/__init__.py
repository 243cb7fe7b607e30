"""Distributed training: collectives and, built on them, the data parallel wrappers."""

from systems.parallel.collectives import process_group

__all__ = ["process_group"]
