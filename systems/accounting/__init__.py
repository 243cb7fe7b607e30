"""Formulas that predict FLOPs, memory and communication time of Transformer training.

The formulas are pure functions and need only the standard library. Some functions take the name of
a device. These functions return None if the required datasheet value of that device is not in
`hardware.py`.
"""

from systems.accounting.attention import (
    attention_bytes,
    attention_flops,
    materialised_attention_bytes,
    packed_lengths,
    scores_flops,
    softmax_over_matmul_flops,
    tensors_bytes,
    visible_scores,
)
from systems.accounting.collectives import (
    all_gather_seconds,
    all_reduce_bus_bytes,
    all_reduce_seconds,
    predicted_all_reduce_seconds,
    reduce_scatter_seconds,
    ring_bytes,
    whole_tensor_all_reduce_seconds,
)
from systems.accounting.data_parallel import (
    best_bucket_bytes,
    best_bucket_count,
    ddp_overhead_seconds,
    predicted_ddp_overhead_seconds,
    rank_state_bytes,
    step_sent_bytes,
)
from systems.accounting.dtypes import DTYPE_BYTES, MATMUL_DTYPE
from systems.accounting.hardware import link_bandwidth, memory_bytes, peak_flops
from systems.accounting.transformer import (
    MODEL_SIZES,
    Attention,
    Phase,
    Precision,
    TransformerSize,
    activation_bytes,
    best_checkpoint_interval,
    block_gradient_bytes,
    block_parameters,
    block_saved_bytes,
    model_state_bytes,
    optimizer_step_bytes,
    peak_memory_bytes,
    residual_stream_bytes,
    transformer_flops,
    transformer_parameters,
    weight_copy_bytes,
)

__all__ = [
    "DTYPE_BYTES",
    "MATMUL_DTYPE",
    "MODEL_SIZES",
    "Attention",
    "Phase",
    "Precision",
    "TransformerSize",
    "activation_bytes",
    "all_gather_seconds",
    "all_reduce_bus_bytes",
    "all_reduce_seconds",
    "attention_bytes",
    "attention_flops",
    "best_bucket_bytes",
    "best_bucket_count",
    "best_checkpoint_interval",
    "block_gradient_bytes",
    "block_parameters",
    "block_saved_bytes",
    "ddp_overhead_seconds",
    "link_bandwidth",
    "materialised_attention_bytes",
    "memory_bytes",
    "model_state_bytes",
    "optimizer_step_bytes",
    "packed_lengths",
    "peak_flops",
    "peak_memory_bytes",
    "predicted_all_reduce_seconds",
    "predicted_ddp_overhead_seconds",
    "rank_state_bytes",
    "reduce_scatter_seconds",
    "residual_stream_bytes",
    "ring_bytes",
    "scores_flops",
    "softmax_over_matmul_flops",
    "step_sent_bytes",
    "tensors_bytes",
    "transformer_flops",
    "transformer_parameters",
    "visible_scores",
    "weight_copy_bytes",
    "whole_tensor_all_reduce_seconds",
]
