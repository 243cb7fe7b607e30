"""Names of matmul kernels as people say them."""

from __future__ import annotations

import re
from typing import Any

# Patterns for kernels of cuBLAS, of CUTLASS inside it, and newer ones of cuBLAS
_PATTERNS = (
    (r"xmma_gemm_f32f32_.*_([tn]{2})_n_tilesize(\d+x\d+x\d+)", r"cuBLAS SGEMM \2 (\1)"),
    (r"cutlass_\d+_simt_sgemm_(\d+x\d+)_(\d+)x\d+_([tn]{2})", r"CUTLASS SGEMM \1x\2 (\3)"),
    (r"nvjet_\w+?_(\d+x\d+)_(\d+)x\d+_\w*?([TN]{2})[TN]?\b", r"cuBLAS \1x\2 (\3)"),
)


def matmul_name(name: Any) -> Any:
    """Return the library, the tile and the layout of a kernel: `cuBLAS SGEMM 128x128x8 (tn)`.

    Another name, or a value that is not measured, is returned as it is.
    """
    for pattern, short in _PATTERNS:
        if found := re.search(pattern, str(name)):
            return found.expand(short)
    return name
