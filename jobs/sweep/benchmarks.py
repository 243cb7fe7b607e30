"""Finds benchmarks by name and reads their parameters, without importing torch."""

from __future__ import annotations

import importlib
import importlib.abc
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from jobs.errors import CommandError, nearest
from jobs.sweep.messages import wrong_value
from systems.external.parameter import Implementation
from systems.external.reference import is_reference

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", re.ASCII)
_RUN = re.compile(r"^def run\(", re.MULTILINE)
# Names that tables use for something else than a parameter
RESERVED = ("phase", "device", "repeat", "value")


class NoBenchmark(CommandError):
    """Raised if a benchmark does not exist, or if its module cannot be used."""


@dataclass(frozen=True)
class Benchmark:
    """What the module of a benchmark declares."""

    name: str
    version: int
    params: type[BaseModel]
    json_defaults: dict[str, Any]  # default values of the parameters, as in JSON
    predicts: bool = False  # True if the module has a function `predict`
    sources: Callable[[Any], Any] | None = None  # the function `sources` of the module

    @property
    def fields(self) -> list[str]:
        """The names of the parameters of the benchmark."""
        return list(self.params.model_fields)

    def wrong_value(self, name: str, value: Any) -> str | None:
        """Return an error message if a parameter cannot have a value, else None."""
        try:
            _adapter(self.params, name).validate_python(value)
        except ValidationError as error:
            return wrong_value(name, value, error)
        return None

    def never_equals(self, name: str, value: Any) -> str | None:
        """Return an error message if a parameter can never equal a value, such as 128.0."""
        if isinstance(value, float) and value.is_integer():
            return self.wrong_value(name, int(value)) and self.wrong_value(name, value)
        return self.wrong_value(name, value)

    def references(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the references in the parameters of a run, such as `my_ddp.py:MyDDP`."""
        return tuple(params[name] for name in self._selectors if is_reference(params[name]))

    @cached_property
    def _selectors(self) -> list[str]:
        """The names of the parameters that select an implementation."""
        return [
            name
            for name, field in self.params.model_fields.items()
            if any(isinstance(item, Implementation) for item in field.metadata)
        ]


@cache
def _adapter(params: type[BaseModel], name: str) -> TypeAdapter[Any]:
    """Return what validates the values of a parameter."""
    field = params.model_fields[name]
    kind: Any = field.annotation
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # has its own config
    annotated: Any = Annotated[kind, *field.metadata] if field.metadata else kind
    return TypeAdapter(annotated, config=None if is_model else ConfigDict(strict=True))


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks of a sweep and of its cases."""

    own: Benchmark  # the default benchmark, named at the top level of the file
    by_name: dict[str, Benchmark]  # including the default

    def of(self, name: str | None) -> Benchmark:
        """Return the benchmark with this name. None: the default benchmark."""
        return self.own if name is None else self.by_name[short_name(name)]

    def __iter__(self) -> Iterator[Benchmark]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def fields(self) -> list[str]:
        """The names of the parameters of all benchmarks, without duplicates."""
        return list(dict.fromkeys(field for benchmark in self for field in benchmark.fields))

    def never_equals(self, name: str, value: Any) -> str | None:
        """Return an error message if a name equals a value in no benchmark, else None."""
        if name == "run.benchmark":
            known = list(self.by_name)
            hint = nearest(str(value), known)
            return None if value in known else f"no run of this sweep has benchmark {value!r}{hint}"
        wrong = [each.never_equals(name, value) for each in self if name in each.fields]
        return wrong[0] if all(wrong) else None


def short_name(name: str) -> str:
    """Return the name of a benchmark without the prefix `systems.benchmarks.`, as in run ids."""
    return name.removeprefix("systems.benchmarks.")


def benchmark_module(name: str) -> ModuleType:
    """Import and return a module in `systems.benchmarks`, or a module with a dotted name.

    Raises NoBenchmark if it does not exist or is no benchmark, and what its import raises.
    """
    if not _NAME.match(name) or ("." not in name and name not in known_benchmarks()):
        raise NoBenchmark(f"there is no benchmark {name!r}{nearest(name, known_benchmarks())}")
    path = name if "." in name else f"systems.benchmarks.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise  # the benchmark exists, but a module that it imports does not
        package = error.name.rpartition(".")[0]  # its modules need not be benchmarks
        modules = pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", ()))
        hint = nearest(error.name, [f"{package}.{module.name}" for module in modules])
        raise NoBenchmark(f"there is no benchmark {name!r}: {error}{hint}") from None
    params = getattr(module, "Params", None)
    is_model = isinstance(params, type) and issubclass(params, BaseModel)
    if not is_model or not hasattr(module, "run"):
        what = "it must define run(params) and Params, a pydantic model"
        raise NoBenchmark(f"{path} is not a benchmark: {what}")
    return module


def known_benchmarks() -> list[str]:
    """Return the names of the modules in systems/benchmarks that define `run`, sorted.

    They are not imported, because some modules there import torch.
    """
    package = importlib.import_module("systems.benchmarks")
    return sorted(
        path.stem
        for folder in package.__path__
        for path in Path(folder).glob("*.py")
        if _RUN.search(path.read_text(encoding="utf-8"))
    )


def load_benchmark(name: str) -> Benchmark:
    """Import the module of a benchmark.

    Raises NoBenchmark if it does not exist, if its import fails or imports torch, or if one of its
    parameters has a name that tables use for something else, such as `phase`.
    """
    try:
        with _TorchGuard():
            module = benchmark_module(name)
    except NoBenchmark:
        raise
    except (Exception, SystemExit, _TorchImport) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        if is_missing or isinstance(error, _TorchImport):
            raise NoBenchmark(
                f"benchmark {name!r} imports torch at the top of {_place(error)}: import torch "
                "inside run(), so that machines without torch can read its parameters"
            ) from None
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        text = (text.splitlines() or [""])[0]
        where = f"{type(error).__name__}: {text} ({_place(error)})"
        raise NoBenchmark(f"benchmark {name!r} cannot be imported: {where}") from error
    params: type[BaseModel] = module.Params
    taken = [field for field in params.model_fields if field in RESERVED]
    if taken:
        raise NoBenchmark(
            f"{name}: parameter {taken[0]!r} must have another name; "
            f"tables reserve the names {', '.join(RESERVED)}"
        )
    optional = {field for field, info in params.model_fields.items() if not info.is_required()}
    return Benchmark(
        short_name(name),
        int(getattr(module, "VERSION", 1)),
        params,
        json_defaults=params.model_construct().model_dump(mode="json", include=optional),
        predicts=hasattr(module, "predict"),
        sources=getattr(module, "sources", None),
    )


class _TorchImport(BaseException):
    """Raised at an import of torch. It is no Exception, so that a module does not catch it."""


class _TorchGuard(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Context in which the first import of torch fails. `importlib.util.find_spec` finds it."""

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        found = PathFinder.find_spec("torch") if fullname == "torch" else None
        return ModuleSpec("torch", self, origin=found.origin) if found else None

    def exec_module(self, module: ModuleType) -> None:
        raise _TorchImport


def _place(error: BaseException) -> str:
    """Return the file and line of the code at the top of a module that raised an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen")]
    return f"{own[-1].filename}:{own[-1].lineno}"
