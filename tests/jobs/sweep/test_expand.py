"""Expansion of a sweep into runs: the product of its blocks, stable run ids, and speed."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from jobs.errors import InputError
from jobs.run import Shape, run_id
from jobs.sweep.benchmarks import load_benchmark
from jobs.sweep.expand import expand
from jobs.sweep.load import LoadedSweep, load_sweep
from jobs.sweep.schema import Sweep
from jobs.sweep.strict_yaml import Document
from tests.benchmarks import toy
from tests.jobs.harness import ROOT, run_python
from tests.jobs.results_folder import GRID, TOY, load, params_of, write

NAME = "tests.benchmarks.toy"
SLOW = settings(max_examples=30)  # no deadline, because a test may be slow on a busy machine


# ---- the product ---------------------------------------------------------------------------------


def test_cases_replace_what_the_sweep_says(tmp_path: Path) -> None:
    text = """\
resources: {nodes: 3, gpus_per_node: $ranks}
timeout_s: 50
cases:
  - fixed: {size: 1, ranks: 2}
  - fixed: {size: 9, ranks: 7}
    resources: {gpus_per_node: 0}
    launch: {nproc_per_node: $ranks}
    timeout_s: 5
"""
    runs = expand(load(tmp_path, TOY + text)).runs
    assert [(run.shape, run.timeout_s) for run in runs] == [
        (Shape(nodes=3, gpus_per_node=2), 50),
        (Shape(nodes=3, gpus_per_node=0, nproc_per_node=7), 5),
    ]


def test_a_manifest_gives_back_the_same_runs() -> None:
    """`jobs retry` depends on this."""
    for path in sorted((ROOT / "sweeps").glob("*.yaml")):
        loaded = load_sweep(path)
        data = json.loads(json.dumps(loaded.sweep.model_dump(mode="json", by_alias=True)))
        again = LoadedSweep(Sweep.model_validate(data), loaded.benchmarks, Document(data, "m.json"))
        assert expand(again) == expand(loaded)


def test_doubles_are_counted_and_run_once(tmp_path: Path) -> None:
    expansion = expand(load(tmp_path, TOY + "grid: {size: [1, 2, 1], scale: [1, 1.0]}\n"))
    assert [run.params["size"] for run in expansion.runs] == [1, 2]
    assert expansion.duplicates == 4


def test_shuffle_is_a_permutation_that_its_seed_fixes(tmp_path: Path) -> None:
    text = TOY + f"grid: {{size: {list(range(1, 40))}}}\n"
    overrides = ("order=as_written", "order={shuffle: 1}", "order={shuffle: 2}")
    plain, one, two = (params_of(load(tmp_path, text, order), "size") for order in overrides)
    assert plain != one != two
    assert plain == sorted(one) == sorted(two)


def test_type_of_gpu(tmp_path: Path) -> None:
    """A type may be the value of a parameter. It has no effect without GPUs."""
    text = TOY + "fixed: {size: 1, label: h100}\nresources: {gpu_type: $label, gpus_per_node: 2}\n"
    (run,) = expand(load(tmp_path, text)).runs
    assert (run.shape.gpu_type, str(run.shape)) == ("h100", "1 node, 2 h100 GPUs per node")
    (run,) = expand(load(tmp_path, text, "resources.gpus_per_node=0")).runs
    assert run.shape.gpu_type is None
    with pytest.raises(InputError, match=r"gpu_type must be text that matches .* got .label = "):
        expand(load(tmp_path, text, 'label="a\'b"'))


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "size": st.integers(8, 12),
    "mode": st.sampled_from(["fast", "exact"]),
    "scale": st.sampled_from([0.25, 0.5, 1, 2.0]),
    "window": st.none() | st.integers(1, 4),
    "causal": st.booleans(),
    "label": st.sampled_from(["", "on", "010", "a'b", 'c"d', "é"]),
    "ranks": st.integers(1, 3),
}
DEFAULTS = {"mode": "fast", "scale": 1.0, "window": None, "causal": False, "label": "", "ranks": 1}


@st.composite
def axes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw fixed, grid and zip sections with disjoint parameters."""
    names = draw(st.permutations(sorted(VALUES)))
    cut = sorted(draw(st.lists(st.integers(0, len(names)), min_size=3, max_size=3)))
    length = draw(st.integers(1, 3))
    many = {"min_size": 1, "max_size": 3}
    return {
        "fixed": {n: draw(VALUES[n]) for n in names[: cut[0]]},
        "grid": {n: draw(st.lists(VALUES[n], **many)) for n in names[cut[0] : cut[1]]},
        "zip": {
            n: draw(st.lists(VALUES[n], min_size=length, max_size=length))
            for n in names[cut[1] : cut[2]]
        },
    }


@st.composite
def sweeps(draw: st.DrawFn) -> dict[str, Any]:
    sweep = draw(axes()) | {"name": "toy", "benchmark": NAME}
    if not any("size" in sweep[axis] for axis in ("fixed", "grid", "zip")):
        sweep["fixed"]["size"] = 9
    sweep["cases"] = draw(st.lists(axes(), max_size=3))
    excluded = st.dictionaries(st.sampled_from(["mode", "causal", "ranks"]), st.none(), min_size=1)
    sweep["exclude"] = [
        {
            name: draw(st.one_of(VALUES[name], st.lists(VALUES[name], min_size=1, max_size=2)))
            for name in entry
        }
        for entry in draw(st.lists(excluded, max_size=2))
    ]
    return sweep


def reference(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of each run of a sweep, once, as the documentation defines them.

    zip sections vary slowest, then the keys of grid. The last key varies fastest. A key of grid
    that a case repeats keeps its position.
    """
    found: list[dict[str, Any]] = []
    for case in sweep["cases"] or [{"fixed": {}, "grid": {}, "zip": {}}]:
        mine = {*case["fixed"], *case["grid"], *case["zip"]}
        theirs = {axis: {k: v for k, v in sweep[axis].items() if k not in mine}
                  for axis in ("fixed", "zip")}  # fmt: skip
        lists: list[list[dict[str, Any]]] = []
        for zipped in (theirs["zip"], case["zip"]):
            if zipped:
                rows = zip(*zipped.values(), strict=True)
                lists.append([dict(zip(zipped, row, strict=True)) for row in rows])
        grid = sweep["grid"] | case["grid"]
        for name in (n for n in grid if n not in {*case["fixed"], *case["zip"]}):
            lists.append([{name: value} for value in grid[name]])
        for combination in itertools.product(*lists):
            point = DEFAULTS | theirs["fixed"] | case["fixed"]
            for part in combination:
                point |= part
            point["scale"] = float(point["scale"])
            excluded = any(
                all(point[k] in (v if isinstance(v, list) else [v]) for k, v in entry.items())
                for entry in sweep["exclude"]
            )
            if point not in found and not excluded:
                found.append(point)
    return found


@SLOW
@given(sweeps())
def test_any_sweep_is_the_product_that_its_blocks_say(
    tmp_path_factory: pytest.TempPathFactory, sweep: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(json.dumps(sweep))  # JSON is YAML
    wanted = reference(sweep)
    if not wanted:  # a sweep without runs is an error, which other tests check
        return
    runs = expand(load_sweep(path)).runs
    found = json.dumps([run.params for run in runs], sort_keys=True)
    assert found == json.dumps(wanted, sort_keys=True)  # 1 is not 1.0
    assert len({run.id for run in runs}) == len(wanted)  # no two runs share an id


@SLOW
@given(sweeps(), st.randoms(use_true_random=False))
def test_ids_do_not_change_with_how_a_sweep_is_written(
    tmp_path_factory: pytest.TempPathFactory, sweep: dict[str, Any], rng: random.Random
) -> None:
    """Ids do not depend on the order of keys, values and cases, on names, or on the partition."""
    if not reference(sweep):
        return

    def shuffled(mapping: dict[str, Any]) -> dict[str, Any]:
        items = list(mapping.items())
        rng.shuffle(items)
        return {k: shuffled(v) if isinstance(v, dict) else v for k, v in items}

    other = shuffled(sweep)
    other["cases"] = [shuffled(case) for case in sweep["cases"]]
    rng.shuffle(other["cases"])
    other |= {"name": "other", "slurm": {"partition": "h100"}, "order": {"shuffle": 1}}
    ids = []
    for name, data in (("one.yaml", sweep), ("two.yaml", other)):
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(json.dumps(data))
        ids.append({run.id: run.params for run in expand(load_sweep(path)).runs})
    assert ids[0] == ids[1]


# ---- ids -----------------------------------------------------------------------------------------


def test_a_new_parameter_with_a_default_keeps_ids_and_a_new_version_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TOY + GRID
    before = [run.id for run in expand(load(tmp_path, text)).runs]

    class Params(toy.Params):
        backend: Literal["a", "b"] = "a"
        depth: Annotated[int, Field(ge=1)] = 4

    monkeypatch.setattr(toy, "Params", Params)
    after = expand(load(tmp_path, text)).runs
    assert [run.id for run in after] == before
    assert all(run.params["backend"] == "a" for run in after)
    other = [run.id for run in expand(load(tmp_path, text, "backend=b")).runs]
    assert not set(other) & set(before)
    monkeypatch.setattr(toy, "VERSION", 2)
    assert not {run.id for run in expand(load(tmp_path, text)).runs} & set(before)


def test_the_benchmarks_short_name_and_its_path_are_one() -> None:
    assert load_benchmark("systems.benchmarks.attention") == load_benchmark("attention")


SCALARS = st.one_of(
    st.booleans(), st.integers(), st.text(max_size=4), st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
PARAMS = st.dictionaries(st.sampled_from("abcd"), SCALARS)


@settings(max_examples=200)
@given(PARAMS, PARAMS)
def test_two_ids_are_the_same_only_for_the_same_params(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    """1, 1.0 and True are equal in Python, but they give different ids."""
    defaults = {"a": 1, "b": None, "c": "", "d": 0.0}
    first, second = (defaults | params for params in (one, two))
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (run_id("any", 1, first, defaults) == run_id("any", 1, second, defaults)) == same


# ---- without torch, in time ----------------------------------------------------------------------


def test_importing_the_launcher_imports_neither_torch_nor_pandas() -> None:
    """Only `load` and `export` import `frame`."""
    paths = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "jobs").rglob("*.py")}
    paths -= {Path("jobs/__main__"), Path("jobs/worker/__main__"), Path("jobs/frame/flat")}
    modules = [".".join(path.parts) for path in paths if path.name != "__init__"]
    slow = "{'torch', 'pandas'}"
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({slow} & set(sys.modules)))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout


def test_a_dry_run_of_10_000_runs_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    seeds = list(range(1250))
    path = write(
        tmp_path,
        f"""\
        name: many
        benchmark: attention
        fixed: {{head_dim: 64}}
        grid:
          dtype: [bf16, fp32]
          seq_len: [128, 256]
          implementation: [naive, sdpa_flash]
          seed: {seeds}
        exclude: [dtype == fp16]
        """,
    )
    before = getrusage(RUSAGE_CHILDREN)
    command = ("-X", "importtime", "-m", "jobs.submit", path, "--dry-run")
    done = run_python(*command, "--out", tmp_path / "out")
    after = getrusage(RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stdout
    assert "10000" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stdout.splitlines()}
    assert "jobs.sweep.expand" in imported
    assert not imported & {"torch", "triton", "pandas", "matplotlib"}
    assert took < 6  # seconds of CPU time; about 2 on an idle machine
    assert not (tmp_path / "out").exists()
