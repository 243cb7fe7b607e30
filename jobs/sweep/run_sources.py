"""The sources that a run measures: their hash, and whether a record was made from them.

A benchmark can define the function `sources(params)`, see `systems.benchmark`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jobs.code.measured_files import find
from jobs.code.sources import SourceTree
from jobs.run import Run
from jobs.sweep.benchmarks import load_benchmark


def source_hashes(runs: Iterable[Run], sources: RunSources | None = None) -> dict[str, str | None]:
    """Return the hash of the present sources of each run, by run id. None: unknown."""
    sources = sources or RunSources()
    by_id = {run.id: run for run in runs}
    return {id: sources.source_hash(run) for id, run in by_id.items()}


class RunSources:
    """Reads the sources of runs at one moment. An object does not see later changes of files."""

    def __init__(self) -> None:
        self._tree = SourceTree()
        self._files_of = cache(self._find_files)
        self._function = cache(self._find_function)

    def source_hash(self, run: Run) -> str | None:
        """Return the hash of the sources that a run measures, 16 hexadecimal digits.

        Comments, docstrings, blank lines and trailing spaces do not count. None if it is unknown,
        because code cannot be read or the run is executed with another checkout.
        """
        files = self.files(run)
        return None if files is None else self._tree.hash_of(files)

    def files(self, run: Run) -> frozenset[Path] | None:
        """Return the files that count for the hash of a run. None if they are unknown."""
        if run.checkout:
            return None
        module = run.benchmark if "." in run.benchmark else f"systems.benchmarks.{run.benchmark}"
        modules: tuple[str, ...] = (module,)
        left_out: tuple[str, ...] = ()
        try:
            function = self._function(run.benchmark, module)
            if function is not None:
                found = function(run.params)
                modules, left_out = (module, *found.modules), tuple(found.left_out)
        except (Exception, SystemExit):  # code of the user, or old parameters
            return None
        return self._files_of(modules, left_out, run.code)

    def _find_function(self, name: str, module: str) -> Callable[[dict[str, Any]], Any] | None:
        """Return the function `sources` of a benchmark, as a function of the parameters in JSON.

        Without one, the result is None, and the benchmark is not imported.
        """
        path = find(module)
        source = None if path is None else self._tree.source(path)
        if source is None or "sources" not in source.functions:
            return None
        benchmark = load_benchmark(name)
        function, model = benchmark.sources, benchmark.params
        assert function is not None
        # The parameters are valid, and validation would take most of the time for many runs.
        return lambda params: function(model.model_construct(**params))

    def _find_files(
        self, modules: tuple[str, ...], left_out: tuple[str, ...], references: tuple[str, ...]
    ) -> frozenset[Path] | None:
        found = [self._tree.files(name, left_out) for name in modules]
        found += [self._tree.files(name) for name in references]
        known = [files for files in found if files is not None]
        return frozenset().union(*known) if len(known) == len(found) else None
