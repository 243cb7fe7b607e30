"""Tests of the check of descriptors; test_flash_hopper_machine_code.py checks all kernels."""

from __future__ import annotations

import pytest

from tests.systems.kernels.wgmma_descriptors import wrong_matmuls

# The descriptor of V is in UR6 and UR7, or in UR10 and UR11. P is in registers.
SECOND = "UIADD3 UR10, UP0, UR6, 0x4000080, URZ"
MATMUL = """
HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR4].tnspB, R88
HGMMA.64x128x16.F32.BF16 R88, R156, gdesc[UR8].tnspB, R88, gsb0
"""


def code(text: str) -> str:
    """Return lines as cuobjdump prints them. A label `name:` is replaced by its address."""
    lines: list[str] = []
    labels = {}
    for line in text.split("\n"):
        if line.endswith(":"):
            labels[line[:-1]] = f"{16 * len(lines):#06x}"
        elif line:
            lines.append(line)
    for name, address in labels.items():
        lines = [line.replace(name, address) for line in lines]
    return "\n".join(f"/*{16 * i:04x}*/  {x} ;" for i, x in enumerate(lines))


BRANCHES = f"""
R2UR UR6, R6
USHF.R.U32.HI UR6, URZ, 0x4, UR6
{{before}}
@!P0 BRA OTHER
{SECOND}
ULOP3.LUT UR6, UR6, 0x4000000, URZ, 0xfc, !UPT
{MATMUL}
BRA END
OTHER:
{{other}}
ULOP3.LUT UR6, UR6, 0x4000000, URZ, 0xfc, !UPT
{MATMUL}
END:
EXIT
"""


@pytest.mark.parametrize(
    ("before", "other"),
    [
        ("", ""),
        ("MOV R8, R6", "R2UR UR10, R8"),
        ("", f"@P1 {SECOND}"),
        ("", "@P1 STL [R1], R6\nLDL R9, [R1]\nR2UR UR10, R9\nUSHF.R.U32.HI UR10, URZ, 0x4, UR10"),
        ("", SECOND.replace("UR6", "UR7")),
    ],
    ids=["only in one", "not shifted", "under a condition", "spilled so", "of another register"],
)
def test_descriptors_that_one_branch_does_not_compute(before: str, other: str) -> None:
    n_matmuls, wrong = wrong_matmuls(code(BRANCHES.format(before=before, other=other)))
    assert n_matmuls == 2 and len(wrong) == 1


@pytest.mark.parametrize(
    ("before", "within", "after", "n_wrong"),
    [
        (SECOND, "", "UIADD3 UR10, UR10, 0x400, URZ", 0),
        ("", SECOND, "", 0),
        (SECOND, "", "UIADD3 UR10, UR10, 0x80, URZ", 1),
    ],
)
def test_descriptors_that_change_in_a_loop(
    before: str, within: str, after: str, n_wrong: int
) -> None:
    loop = f"""
R2UR UR6, R6
{before}
LOOP:
{within}
{MATMUL}
UIADD3 UR6, UR6, 0x400, URZ
{after}
@P0 BRA LOOP
EXIT
"""
    n_matmuls, wrong = wrong_matmuls(code(loop))
    assert n_matmuls == 1 and len(wrong) == n_wrong
