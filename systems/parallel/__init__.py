"""Data parallel training: wrappers for DDP and FSDP, and an optimizer with sharded state."""

from systems.parallel.collectives import process_group
from systems.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from systems.parallel.fsdp import FullyShardedDataParallel
from systems.parallel.sharded_optimizer import ShardedOptimizer

__all__ = [
    "BucketedDDP",
    "FlatDDP",
    "FullyShardedDataParallel",
    "NaiveDDP",
    "OverlappedDDP",
    "ShardedOptimizer",
    "process_group",
]
