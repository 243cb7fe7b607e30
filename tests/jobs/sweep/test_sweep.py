"""Errors in sweep files: all are reported together, each with its position."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import InputError
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.benchmarks import toy
from tests.jobs.results_folder import TOY, errors, load, params_of, write

SWEEPS = Path(__file__).parents[3] / "sweeps"
ONE = "fixed: {size: 1}\n"  # the only run of a sweep


MIXED_BENCHMARKS = """
name: mixed
benchmark: attention
cases:
- fixed: {seq_len: 128, head_dim: 64, implementation: naive}
- benchmark: train_step
  fixed: {size: small, context_length: 128, batch_size: 1, attention: naive}
"""

# ---- errors --------------------------------------------------------------------------------------


def test_every_error_of_a_file_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        name: many errors
        benchmark: tests.benchmarks.toy
        fixd: {size: 1}
        fixed:
          size: large
          scale: 1e-4
        grid:
          mode: [fast, exakt]
          widnow: [1]
        zip:
          ranks: [1, 2]
          causal: [true]
        repeats: 0
        exclude:
          - mod == fast
        tables:
          - name: t
            title: Sizes {sizes}
            rows: [sise]
            value: speed
        resources: {nodes: $rank}
        """,
    )
    problems = errors(path)
    expected = [
        ("sweep.yaml:1:7: ", "name: got 'many errors', expected text that matches the pattern"),
        ("sweep.yaml:3:1: ", "unknown key 'fixd'; did you mean 'fixed'?"),
        ("sweep.yaml:5:9: ", "size: got 'large', expected a valid integer"),
        ("sweep.yaml:6:10: ", "1.0e-4"),
        ("sweep.yaml:8:16: ", "mode: got 'exakt', expected 'fast' or 'exact'"),
        ("sweep.yaml:8:16: ", "did you mean 'exact'?"),
        ("sweep.yaml:9:3: ", "has no parameter 'widnow'; did you mean 'window'?"),
        (
            "sweep.yaml:10:1: ",
            "zip: all lists must have the same length, got 2 for 'ranks', 1 for 'causal'",
        ),
        ("sweep.yaml:13:10: ", "repeats: got 0, expected greater than or equal to 1"),
        ("sweep.yaml:15:5: ", "'mod' is not a parameter; did you mean 'mode'?"),
        ("sweep.yaml:18:12: ", "title: no parameter 'sizes'; did you mean 'size'?"),
        ("sweep.yaml:19:12: ", "rows: no parameter 'sise'; did you mean 'size'?"),
        ("sweep.yaml:20:12: ", "value: 'speed' is not known"),
        ("sweep.yaml:21:20: ", "nodes: '$rank' does not name a parameter; did you mean 'ranks'?"),
    ]
    for place, words in expected:
        assert any(line.startswith(place) and words in line for line in problems), (
            place,
            words,
            problems,
        )
    assert len(problems) == len({place for place, _ in expected})  # no other errors


@pytest.mark.parametrize("name", ["sweeps/flash.yaml", "sweeps/cpu/flash.yaml"])
def test_a_stock_sweep_is_found_from_any_folder_after_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stock, slip = Path(name), Path(name.replace("flash", "flahs"))
    with pytest.raises(InputError, match=rf"^{slip}: cannot be read: .*; did you mean '{name}'\?"):
        load_sweep(slip)
    assert load_sweep(stock).document.source == str(SWEEPS.parent / name)
    stock.parent.mkdir(parents=True)
    stock.write_text(TOY + ONE)
    assert load_sweep(stock).document.source == name


def test_a_refused_combination_may_be_excluded(tmp_path: Path) -> None:
    """A combination that the benchmark rejects is no error if it is excluded or filtered out."""
    text = TOY + "grid:\n  size: [1, 8]\n  window: [1, 2, 4]\nexclude: [size == 1 and window > 1]\n"
    loaded = load(tmp_path, text)
    assert params_of(loaded, "size", "window") == [(1, 1), (8, 1), (8, 2), (8, 4)]
    assert expand(loaded).excluded == 2
    rest = load(tmp_path, TOY + "grid:\n  size: [1, 8]\n  window: [2]\n", filter="size == 8")
    assert params_of(rest, "size") == [(8,)]


def test_values_are_listed_only_of_what_the_filter_compares(tmp_path: Path) -> None:
    """The word `attention` is also the name of a parameter of train_step."""
    (problem,) = errors(
        write(tmp_path, MIXED_BENCHMARKS), filter="benchmark == attention and size == small"
    )
    assert problem.endswith("(2 left out by the filter); size has the values ['small']"), problem


def test_a_sweep_without_end_is_refused_at_once(tmp_path: Path) -> None:
    """Too many combinations are an error before any combination is created."""
    sizes = ", ".join(map(str, range(1, 1001)))
    text = f"grid:\n  size: [{sizes}]\n  window: [{sizes}]\n  ranks: [{sizes}]\n"
    (problem,) = errors(write(tmp_path, TOY + text))
    assert "at most 1000000 runs, got 1000000000 combinations x 1 repeats" in problem


def test_a_parameter_may_not_be_named_like_what_tables_show_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables would read such a parameter from the record, so two runs could share a cell."""

    class Params(toy.Params):
        device: str = "cpu"

    monkeypatch.setattr(toy, "Params", Params)
    problems = errors(write(tmp_path, TOY + "fixed: {size: 1}\ngrid: {device: [cpu, gpu]}\n"))
    assert problems == [
        "sweep.yaml:2:12: tests.benchmarks.toy: parameter 'device' must have another name; "
        "tables reserve the names phase, device, repeat, value"
    ]
