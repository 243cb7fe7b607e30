"""The code of all Hopper kernels of attention, compiled for sm_90 on a machine without a GPU.

ptxas compiles some kernels to slow or wrong code without an error, see wgmma_descriptors.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from systems.kernels.flash_attention.hopper.tiles import (
    FEW_BLOCKS,
    FORWARD,
    NARROW_VALUES,
    PACKED_HEAD_DIMS,
    SHORT,
    forward_tile,
)
from tests.systems.kernels.hopper import cuobjdump
from tests.systems.kernels.selection import slow
from tests.systems.kernels.wgmma_descriptors import wrong_matmuls

FORMS = ["full", "causal", "split", "window", "packed", "softcap"]
TILES = {
    "64": (64, 64, FORWARD[64]),
    "64-short": (64, 64, SHORT),
    "64-few": (64, 64, FEW_BLOCKS),
    "96": (96, 96, FORWARD[96]),
    "128": (128, 128, FORWARD[128]),
    "192": (192, 192, FORWARD[192]),
    "192-128": (192, 128, NARROW_VALUES),
    "256": (256, 256, FORWARD[256]),
}
# Arguments of compile_hopper by the name of a case
KERNELS: dict[str, dict[str, Any]] = {}
for (tile_name, (head_dim, value_dim, tile)), form in product(TILES.items(), FORMS):
    if form == "packed" and head_dim not in PACKED_HEAD_DIMS:
        continue
    dims = {"head_dim": head_dim, "value_dim": value_dim, "form": form}
    if (tile, form) == (NARROW_VALUES, "packed"):
        tile = forward_tile(192, 1 << 14, True, True, 128)
    if (tile_name, form) != ("96", "split"):  # forward does not split keys there
        KERNELS[f"forward {tile_name} {form}"] = {"name": "forward", "tile": tile, **dims}
    if not tile_name.startswith("64-"):
        backward = {"name": "backward", **dims}
        KERNELS[f"backward {tile_name} {form}"] = backward
        KERNELS[f"backward {tile_name} {form} grouped"] = {**backward, "q_per_kv": 4}
        if form == "split":  # heads of q that share keys, instead of queries
            KERNELS[f"backward {tile_name} {form} heads"] = {**backward, "q_per_kv": 2}
    if tile_name in ("64", "128") and form != "split":
        KERNELS[f"backward {tile_name} {form} in order"] = {**backward, "deterministic": True}
TWO_FEATURES_SPILL = 40  # bytes per thread of a backward kernel with grouped heads and another one
# One of each kernel
ALWAYS = [
    "forward 64-short causal", "backward 64 packed", "backward 128 causal in order",
    "backward 192-128 window", "backward 256 softcap",
]  # fmt: skip


def assert_barrier_before_release(ptx: str, of_loads: bool) -> None:
    """Check that all warps have waited for a WGMMA before one of them releases a slot.

    Each warp waits separately, so a barrier must come between the wait and the arrival.

    Args:
        of_loads: check this also for loads from shared memory. It must be False if the producer,
            which is a single warp and needs no barriers, loads from shared memory.
    """
    reads = ["wgmma.wait_group", *(["ld.shared", "ldmatrix"] if of_loads else [])]
    waited = False
    for line in ptx.splitlines():
        if any(read in line for read in reads):
            waited = True
        elif "bar.sync" in line or "barrier.sync" in line:
            waited = False
        assert not (waited and "mbarrier.arrive" in line), line


@pytest.mark.parametrize("case", [x if x in ALWAYS else slow(x) for x in KERNELS])
def test_compiled_for_hopper(case: str) -> None:
    pytest.importorskip("triton")
    from scripts.compile_check import FEATURE_SPILLS, compile_hopper, fault, spill_limit

    given = KERNELS[case]
    found = compile_hopper(**given)
    is_forward, in_order = given["name"] == "forward", given.get("deterministic", False)
    tile = given.get("tile")
    spills = FEATURE_SPILLS if in_order else spill_limit(found, given["form"], tile)
    if "q_per_kv" in given and given["form"] in ("packed", "softcap"):
        spills = TWO_FEATURES_SPILL
    resident = tile.resident if tile else 1
    assert not fault(found, spills, resident)
    assert_barrier_before_release(found.ptx, of_loads=not is_forward and given["head_dim"] > 64)
    sass = cuobjdump(found.compiled, "-sass")
    n_matmuls, wrong = wrong_matmuls(sass)
    assert n_matmuls >= 8 and not wrong
    # Warps exchange registers (setmaxnreg), and WGMMAs are waited for in groups. If ptxas cannot
    # keep either, it generates a slow kernel without an error. It does so for the tile SHORT, which
    # has half of the registers.
    assert "USETMAXREG" in sass
    assert resident > 1 or 0 < sass.count("WARPGROUP.") < sass.count("HGMMA") / 2
    if not is_forward:
        assert "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add" in found.ptx
    if in_order:  # an addition must be complete before that of the next block may begin
        assert "cp.async.bulk.wait_group 0;" in found.ptx and "ld.acquire" in found.ptx
