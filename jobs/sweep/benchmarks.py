"""Finding a benchmark by name and reading its parameters, without importing torch."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from jobs.errors import nearest
from jobs.sweep.schema import PSEUDO

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", re.ASCII)
_RUN = re.compile(r"^def run\(", re.MULTILINE)


class NoBenchmark(LookupError):
    """There is none of this name, or what there is cannot be used; the text says why."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark module, seen from the launcher: its name, version and parameters."""

    name: str
    version: int
    params: type[BaseModel]
    json_defaults: dict[str, Any]  # of the parameters that have one, as JSON shows them
    predicts: bool = False  # whether it says of a run beforehand what is to be expected

    @property
    def fields(self) -> list[str]:
        return list(self.params.model_fields)


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks of a sweep: its own, and those that cases have instead."""

    own: Benchmark
    by_name: dict[str, Benchmark]  # its own among them

    def of(self, name: str | None) -> Benchmark:
        """That of a case or a view which names this one, or none."""
        return self.own if name is None else self.by_name[short_name(name)]

    def __iter__(self) -> Iterator[Benchmark]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def fields(self) -> list[str]:
        """Every parameter that one of them has."""
        return list(dict.fromkeys(field for benchmark in self for field in benchmark.fields))


def short_name(name: str) -> str:
    """One benchmark, one name, one id a run: without the folder that most of them lie in."""
    return name.removeprefix("systems.benchmarks.")


def benchmark_module(name: str) -> ModuleType:
    """The module of a benchmark: `systems.benchmarks.<name>`, or a dotted name of one's own.

    Raises:
        NoBenchmark: naming the benchmarks that exist. And whatever its import raises.
    """
    if not _NAME.match(name) or ("." not in name and name not in known_benchmarks()):
        raise NoBenchmark(f"no benchmark {name!r}{nearest(name, known_benchmarks())}")
    path = name if "." in name else f"systems.benchmarks.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise  # the benchmark exists; something that it imports does not
        raise NoBenchmark(f"no benchmark {name!r}{nearest(name, known_benchmarks())}") from None
    params = getattr(module, "Params", None)
    is_model = isinstance(params, type) and issubclass(params, BaseModel)
    if not is_model or not hasattr(module, "run"):
        what = "it needs run and Params, a pydantic model"
        raise NoBenchmark(f"{path} is no benchmark: {what}{nearest(name, known_benchmarks())}")
    return module


def known_benchmarks() -> list[str]:
    """Names of the benchmarks in systems/benchmarks: by their text, because importing all of that
    folder would import torch."""
    package = importlib.import_module("systems.benchmarks")
    return sorted(
        path.stem
        for folder in package.__path__
        for path in Path(folder).glob("*.py")
        if _RUN.search(path.read_text(encoding="utf-8"))
    )


def load_benchmark(name: str) -> Benchmark:
    """Read a benchmark's parameters. Imports its module, which must not import torch.

    Raises:
        NoBenchmark: there is no such benchmark, its import fails, or its parameters' names are
            taken.
    """
    try:
        module = benchmark_module(name)
    except NoBenchmark:
        raise
    except (Exception, SystemExit) as error:
        raise NoBenchmark(f"benchmark {name!r} cannot be imported: {_one_line(error)}") from error
    params: type[BaseModel] = module.Params
    taken = [field for field in params.model_fields if field in PSEUDO]
    if taken:
        raise NoBenchmark(
            f"{name}: no parameter may be named {taken[0]}: tables show it of a record"
        )
    defaults = {
        k: f.get_default(call_default_factory=True)
        for k, f in params.model_fields.items()
        if not f.is_required()
    }
    shown = params.model_construct(**defaults).model_dump(mode="json", include=set(defaults))
    version = int(getattr(module, "VERSION", 1))
    return Benchmark(short_name(name), version, params, shown, hasattr(module, "predict"))


def _one_line(error: BaseException) -> str:
    """An exception of an import in one line: what it is, and the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith("<frozen")]
    text, where = str(error), places[-1]
    if isinstance(error, SyntaxError):
        text, where = error.msg, f"{error.filename}:{error.lineno}"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]} ({where})"


def load_benchmarks(own: str, others: Iterable[str | None]) -> Benchmarks:
    """A sweep's own benchmark, and those that its cases name.

    Raises:
        NoBenchmark: as `load_benchmark`.
    """
    names = dict.fromkeys(short_name(name) for name in (own, *others) if name is not None)
    by_name = {name: load_benchmark(name) for name in names}
    return Benchmarks(by_name[short_name(own)], by_name)


def adapter(field: FieldInfo, config: Any = None) -> TypeAdapter[Any]:
    """What validates one parameter alone."""
    annotation: Any = field.annotation
    if field.metadata:
        annotation = Annotated[annotation, *field.metadata]
    return TypeAdapter(annotation, config=config)
