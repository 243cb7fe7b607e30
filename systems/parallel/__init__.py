"""Data parallel training: DDP and FSDP wrappers, a sharded optimizer, and steps as CUDA graphs."""

from systems.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from systems.parallel.fsdp import FullyShardedDataParallel
from systems.parallel.peer_ddp import PeerDDP
from systems.parallel.sharded_optimizer import ShardedOptimizer
from systems.parallel.step_graph import GraphedStep
from systems.process_group import process_group

__all__ = [
    "BucketedDDP",
    "FlatDDP",
    "FullyShardedDataParallel",
    "GraphedStep",
    "NaiveDDP",
    "OverlappedDDP",
    "PeerDDP",
    "ShardedOptimizer",
    "process_group",
]
