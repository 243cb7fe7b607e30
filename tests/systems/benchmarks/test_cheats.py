"""Attention functions that skip work after a first right call end as wrong or refused."""

from __future__ import annotations

import sys

import pytest

from systems.benchmark import ROUND, WrongOutput
from systems.benchmarks.attention import Params, run
from tests.jobs.harness import ROOT
from tests.systems.training.tiny_training import no_gpu

CHEATS = ROOT / "tests" / "benchmarks" / "cheating_attention.py"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _without_memory() -> None:
    """Import the cheats again in each test, because they remember earlier calls."""
    sys.modules.pop(CHEATS.stem, None)


def _run(name: str, **keys: object) -> dict[str, object]:
    given = {"seq_len": 64, "head_dim": 16, "dtype": "fp32", "warmup_ms": 1.0, "measure_ms": 1.0}
    return run(Params(implementation=f"{CHEATS}:{name}", **(given | keys)))


# When the check finds them on a CPU
CHEATING = {
    "CachedByElement": " after timing",
    "CachedByPointer": " after timing",
    "CachedByPointerAndVersion": " after timing",
    "FirstCallsSkipped": "",
    "PreviousGradients": " after timing",
    # The first call, and the calls with new values after timing, are right.
    "RepeatedInputsSkipped": " in the timed calls",
}


@no_gpu
@pytest.mark.parametrize(("name", "when"), [*CHEATING.items(), ("OnAnotherThread", "")])
def test_a_cheat_is_wrong(name: str, when: str) -> None:
    with pytest.raises(WrongOutput, match=f"{name}{when}: relative L2 error"):
        _run(name)


@no_gpu
def test_later_rounds_of_a_block_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND, '{"check": false}')
    measured = _run("RepeatedInputsSkipped")
    assert "relative_error" not in measured["facts"] and measured["samples_ms"]


@no_gpu
def test_a_tensor_that_may_delay_its_work_is_wrong() -> None:
    with pytest.raises(WrongOutput, match=r"the output must be a torch\.Tensor, got a _Lazy"):
        _run("lazy")


@pytest.mark.slow
@no_gpu
def test_a_few_missing_rows_are_found_where_they_hardly_count() -> None:
    """In bf16 the error of the whole output is within its limit."""
    with pytest.raises(WrongOutput, match=r"every 4 rows .* a few rows are wrong"):
        _run("TailRowsSkipped", seq_len=2048, dtype="bf16")


@no_gpu
def test_the_same_function_without_a_cheat_is_right() -> None:
    facts = _run("_Honest", dtype="bf16")["facts"]
    assert facts["relative_error_after"] != facts["relative_error"]  # other values


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [*CHEATING, "TailRowsSkipped", "OnAnotherStream", "OnAnotherStreamAfterInputs"],
)
@pytest.mark.parametrize("seq_len", [1024, 2048])  # with and without a CUDA graph
def test_a_cheat_is_refused_on_a_gpu(name: str, seq_len: int) -> None:
    with pytest.raises(WrongOutput, match=name):
        _run(name, seq_len=seq_len, dtype="bf16", head_dim=64)
