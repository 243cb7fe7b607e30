"""Terms that the document uses, with their meanings. Both renderers show them."""

from __future__ import annotations

TERMS = {
    "stale": (
        "A record is of older code if the source files that the run measured have changed since. "
        "Its numbers are those of the commit that its record names. The command of the answer "
        "measures them again, into logs/NAME unless --out names another results folder."
    ),
    "process, execution": (
        "Each run is executed in a new process, or in one process for each rank. Samples are the "
        "measurements within a process."
    ),
    "block, round": (
        "A block is a set of runs that are compared. In a round, all of them are executed one "
        "after the other on the same GPUs. The next round has the reverse order."
    ),
    "paired": "Measured in the same rounds. Only paired times have a verdict (docs/verdicts.md).",
    "same, unsure": (
        "A paired speedup without a word is faster or slower: p is below 0.5%, and the difference "
        "is larger than that of two executions of the same code. same: within the margin of the "
        "sweep, 1% by default. unsure: neither, which is possible although the 95% interval does "
        "not contain 1."
    ),
    "attempt": (
        "One execution of a run. If a run was executed several times, for example after a failure, "
        "a table shows one attempt for each repeat and tells how many it does not show."
    ),
    "power-capped": (
        "The GPU lowered its clock during the measurement because it reached its power limit. "
        "This is usual for long matmuls. The times are not corrected for it."
    ),
    "dirty": (
        "The code had changes that were not committed. The characters behind it begin the hash of "
        "these changes."
    ),
    "OOM": (
        "Out of memory. The number in parentheses is the memory in use plus the request that "
        "failed. It can be larger than the memory of the GPU, or smaller, if the free memory is in "
        "blocks that are too small."
    ),
    "MFU": (
        "Model FLOPs utilization: the FLOPs of the matmuls by systems.accounting, divided by the "
        "time and by the peak of the datasheet for the precision. For float32 this is the peak "
        "without tensor cores, for bfloat16 that with them."
    ),
    "alone, exposed": (
        "The step of one GPU without communication, and without sharding, so it updates all "
        "weights, is called alone. The exposed communication is the time by which a step is longer "
        "than alone: in answers by the medians over all processes, in tables by the mean over the "
        "rounds of a process. Profiled exposed time is another quantity: the time in a profile in "
        "which only communication kernels run."
    ),
    "cell": "One configuration of a sweep, such as a size, a length and a precision.",
    "peer": (
        "Wrappers of this project whose GPUs copy gradients or weights into each other's memory, "
        "by copy engines and without NCCL."
    ),
    "alone imbalance": (
        "By how much the slowest rank takes longer than the fastest for a step without "
        "communication."
    ),
    "torch_tuned": (
        "torch's DistributedDataParallel with gradient_as_bucket_view=True, static_graph=True and "
        "broadcast_buffers=False."
    ),
    "bf16, bf16_master, bf16_pure": (
        "bf16: autocast over float32 weights. bf16_master: bfloat16 weight matrices and gradients, "
        "with float32 master weights in the optimizer. bf16_pure: weights, gradients and optimizer "
        "state in bfloat16."
    ),
    "report-a, report-b, report-c": (
        "Three public write-ups of the same studies by other authors, on other machines. They are "
        "for orientation."
    ),
}
