"""The arithmetic behind the tables: FLOPs, bytes, memory, communication, hardware peaks. No torch.

Every function is pure; what is not known (a GPU that is not listed) is None, never a guess.
"""

from systems.accounting.attention import (
    attention_bytes,
    attention_flops,
    materialised_attention_bytes,
    softmax_over_matmul_flops,
)
from systems.accounting.communication import all_reduce_bus_bytes
from systems.accounting.hardware import DTYPE_BYTES, peak_flops
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
    "MODEL_SIZES",
    "Attention",
    "Phase",
    "Precision",
    "TransformerSize",
    "activation_bytes",
    "all_reduce_bus_bytes",
    "attention_bytes",
    "attention_flops",
    "best_checkpoint_interval",
    "block_gradient_bytes",
    "block_parameters",
    "block_saved_bytes",
    "materialised_attention_bytes",
    "model_state_bytes",
    "optimizer_step_bytes",
    "peak_flops",
    "peak_memory_bytes",
    "residual_stream_bytes",
    "softmax_over_matmul_flops",
    "transformer_flops",
    "transformer_parameters",
    "weight_copy_bytes",
]
