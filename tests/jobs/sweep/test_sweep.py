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


def toy_errors(folder: Path, text: str, *overrides: str, filter: str | None = None) -> list[str]:
    return errors(write(folder, TOY + text), *overrides, filter=filter)


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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n", "sweep.yaml:1:1: the file must be a mapping of keys to values, got a list"),
        (b"\xff\xfen\0a\0", "sweep.yaml:1:1: byte 0xff is not valid UTF-8"),
        (b"name: [1\nb: 2\n", "sweep.yaml:2:2: not valid YAML"),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "sweep.yaml").write_bytes(content)
    (line,) = errors(tmp_path / "sweep.yaml")
    assert line.startswith(expected)


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attentoin", "did you mean 'attention'? (valid: "),
        ("tests.benchmarks.nothing", "no benchmark 'tests.benchmarks.nothing'"),
        ("os.path", "it must define run(params) and Params"),
        ("..", "no benchmark '..'"),
        ("timing", "no benchmark 'timing'"),  # without run(), as a helper module of the folder
    ],
)
def test_unknown_benchmark_names_those_that_exist(tmp_path: Path, name: str, words: str) -> None:
    (problem,) = errors(write(tmp_path, f"name: a\nbenchmark: {name}\n"))
    assert problem.startswith("sweep.yaml:2:12: ")
    assert words in problem


def test_a_combination_that_the_benchmark_refuses(tmp_path: Path) -> None:
    """An error of a model validator has the position of the grid, and examples of combinations."""
    (problem,) = toy_errors(tmp_path, "grid:\n  size: [1, 8]\n  window: [1, 2, 4]\n")
    assert problem == (
        "sweep.yaml:4:3: the window is larger than the size (size=1 window=2 and 1 more)"
    )


def test_a_refused_combination_may_be_excluded(tmp_path: Path) -> None:
    """A combination that the benchmark rejects is no error if it is excluded or filtered out."""
    text = TOY + "grid:\n  size: [1, 8]\n  window: [1, 2, 4]\nexclude: [size == 1 and window > 1]\n"
    loaded = load(tmp_path, text)
    assert params_of(loaded, "size", "window") == [(1, 1), (8, 1), (8, 2), (8, 4)]
    assert expand(loaded).excluded == 2
    rest = load(tmp_path, TOY + "grid:\n  size: [1, 8]\n  window: [2]\n", filter="size == 8")
    assert params_of(rest, "size") == [(8,)]


def test_nothing_left_says_why(tmp_path: Path) -> None:
    """The error for a sweep without runs says how many exclude and the filter left out."""
    text = "grid: {size: [1, 2, 3]}\nexclude: [size == 1]\n"
    assert toy_errors(tmp_path, text, filter="size > 5") == [
        "--where: the sweep has no runs (1 left out by exclude, 2 left out by the filter); "
        "size has the values [1, 2, 3]"
    ]
    (problem,) = toy_errors(tmp_path, "grid: {size: [1, 2]}\nexclude: [size > 0]\n")
    assert problem == "sweep.yaml:4:10: the sweep has no runs (2 left out by exclude)"


def test_values_are_listed_only_of_what_the_filter_compares(tmp_path: Path) -> None:
    """The word `attention` is also the name of a parameter of train_step."""
    (problem,) = errors(
        write(tmp_path, MIXED_BENCHMARKS), filter="benchmark == attention and size == small"
    )
    assert problem.endswith("(2 left out by the filter); size has the values ['small']"), problem


def test_references_must_give_whole_numbers(tmp_path: Path) -> None:
    text = "fixed: {size: 1}\nresources: {nodes: $mode, cpus_per_task: $scale}\n"
    first, second = toy_errors(tmp_path, text)
    assert first == ("sweep.yaml:4:20: nodes must be a valid integer, got $mode = 'fast'")
    assert second.startswith("sweep.yaml:4:42: cpus_per_task must be a valid integer, got $scale")


def test_a_sweep_without_end_is_refused_at_once(tmp_path: Path) -> None:
    """Too many combinations are an error before any combination is created."""
    sizes = ", ".join(map(str, range(1, 1001)))
    text = f"grid:\n  size: [{sizes}]\n  window: [{sizes}]\n  ranks: [{sizes}]\n"
    (problem,) = toy_errors(tmp_path, text)
    assert "at most 1000000 runs, got 1000000000 combinations x 1 repeats" in problem


def test_a_parameter_may_not_be_named_like_what_tables_show_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables would read such a parameter from the record, so two runs could share a cell."""

    class Params(toy.Params):
        device: str = "cpu"

    monkeypatch.setattr(toy, "Params", Params)
    problems = toy_errors(tmp_path, "fixed: {size: 1}\ngrid: {device: [cpu, gpu]}\n")
    assert problems == [
        "sweep.yaml:2:12: tests.benchmarks.toy: parameter 'device' must have another name; "
        "tables reserve the names phase, device, repeat, value"
    ]


def test_a_thousand_errors_fit_the_screen(tmp_path: Path) -> None:
    path = write(tmp_path, TOY + "".join(f"key{i}: 1\n" for i in range(1000)))
    with pytest.raises(InputError) as caught:
        load_sweep(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 31
    assert lines[-1] == "… and at least 970 more errors"
