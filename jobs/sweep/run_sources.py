"""The sources that a run measures: their hash, and whether a record was made from them.

A benchmark can define the function `sources(params)`, see `systems.benchmark`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import ROOT
from jobs.code.measured_files import find
from jobs.code.sources import SourceTree
from jobs.run import Run
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark

# Code in another process is not seen among the modules that a run has imported.
_OTHER_PROCESSES = {"concurrent", "multiprocessing", "subprocess", "torch.multiprocessing"}
_Key = tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
FUNCTION = "sources"  # name of the function of a benchmark


class RunSources:
    """Reads the sources of runs at one moment. An object does not see later changes of files."""

    def __init__(self) -> None:
        self._tree = SourceTree()
        self._files: dict[_Key, frozenset[Path] | None] = {}
        self._hashes: dict[_Key, str | None] = {}
        self._without: dict[tuple[_Key, tuple[str, ...]], str | None] = {}
        self._functions: dict[str, Callable[[dict[str, Any]], Any] | None] = {}

    def source_hash(self, run: Run) -> str | None:
        """Return the hash of the sources that a run measures.

        Comments, docstrings, blank lines and trailing spaces do not count.

        Returns:
            16 hexadecimal digits. None if the hash is unknown, because the benchmark or the code of
            the user cannot be read, or because the run is executed with another checkout.
        """
        key = self._key(run)
        if key is None:
            return None
        if key not in self._hashes:
            files = self._files_of(key)
            self._hashes[key] = None if files is None else self._tree.hash_of(files)
        return self._hashes[key]

    def files(self, run: Run) -> list[Path] | None:
        """Return the files that count for the hash of a run, sorted. None if they are unknown."""
        key = self._key(run)
        files = None if key is None else self._files_of(key)
        return None if files is None else sorted(files)

    def hash_without(self, run: Run, paths: tuple[str, ...]) -> str | None:
        """Return the hash of the sources of a run except some files, given as by `shown_path`.

        None if it is unknown, or if one of the other files can start processes: they may import
        what the run has not imported itself.
        """
        key = self._key(run)
        if key is None:
            return None
        if (key, paths) not in self._without:
            files = {path for path in self._files_of(key) or () if shown_path(path) not in paths}
            starts = any(
                item.module in _OTHER_PROCESSES or item.module.split(".")[0] in _OTHER_PROCESSES
                for path in files
                if (source := self._tree.source(path))
                for item in source.imports
            )
            found = None if starts or not files else self._tree.hash_of(frozenset(files))
            self._without[key, paths] = found
        return self._without[key, paths]

    def _key(self, run: Run) -> _Key | None:
        """Return what determines the files of a run. None if it is unknown."""
        if run.checkout:
            return None
        module = run.benchmark if "." in run.benchmark else f"systems.benchmarks.{run.benchmark}"
        try:
            function = self._function(run.benchmark, module)
            if function is None:
                return module, (), (), run.code
            found = function(run.params)
            return module, tuple(found.modules), tuple(found.left_out), run.code
        except (Exception, SystemExit):  # code of the user, or old parameters
            return None

    def _function(self, benchmark: str, module: str) -> Callable[[dict[str, Any]], Any] | None:
        """Return the function `sources` of a benchmark as a function of parameters in JSON.

        None if the benchmark does not define it. The benchmark is then not imported.

        Raises:
            NoBenchmark: if the benchmark cannot be loaded.
        """
        if module not in self._functions:
            self._functions[module] = None
            path = find(module)
            source = None if path is None else self._tree.source(path)
            if source is not None and FUNCTION in source.functions:
                self._functions[module] = _sources_of(benchmark)
        return self._functions[module]

    def _files_of(self, key: _Key) -> frozenset[Path] | None:
        if key not in self._files:
            module, modules, left_out, references = key
            found = [self._tree.files(module, left_out)]
            found += [self._tree.files(name, left_out) for name in modules]
            found += [self._tree.files(name) for name in references]
            known = [files for files in found if files is not None]
            complete = len(known) == len(found)
            self._files[key] = frozenset().union(*known) if complete else None
        return self._files[key]


def _sources_of(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function `sources` of a benchmark, as a function of the parameters in JSON.

    Raises:
        NoBenchmark: if the benchmark cannot be loaded.
    """
    benchmark = load_benchmark(name)
    function = benchmark.sources
    if function is None:
        raise NoBenchmark(f"{name}: {FUNCTION} must be a function")
    model = benchmark.params
    defaults = vars(model.model_construct())

    def sources(params: dict[str, Any]) -> Any:
        # The parameters were validated when the sweep was read. To construct a model takes most of
        # the time to find the sources of many runs.
        made = model.__new__(model)
        vars(made).update(defaults)
        vars(made).update(params)
        return function(made)

    return sources


def shown_path(path: Path) -> str:
    """Return the path of a source file, relative to this project or to the current folder."""
    for folder in (ROOT, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)
