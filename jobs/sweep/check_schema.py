"""Checks the keys and types of a sweep file, and provides functions for the other checks.

The module `check_parameters` checks parameters and comparisons. The module `check_views` checks
tables and plots. Each check reports every error that it finds, not only the first one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from jobs.errors import ENOUGH, Position, Problem, nearest
from jobs.published.figures import Published
from jobs.sweep.benchmarks import Benchmark, Benchmarks, adapter
from jobs.sweep.conditions import Check
from jobs.sweep.schema import (
    Blocks,
    Case,
    Launch,
    Plot,
    Resources,
    Shuffle,
    Slurm,
    Sustained,
    Sweep,
    Table,
)
from jobs.sweep.strict_yaml import DataPath, Document

STRICT = ConfigDict(strict=True)
# Valid values, for errors about values of another type.
EXAMPLES: dict[DataPath, str] = {
    ("blocks", "interleave"): ", such as [implementation]",
    ("blocks", "baseline"): ", such as {implementation: naive}",
    ("blocks", "margin"): ", such as 0.01 for 1%",
}
# Keys of a table that are not allowed together with `list`.
NOT_OF_LISTS = {"value", "columns", "baseline", "phase", "statistic", "direction"}


def validate_schema(document: Document, problems: list[Problem]) -> Sweep | None:
    """Check the keys and types of a sweep file, and return the sweep, or None if there are errors.

    Args:
        problems: list to which the errors are added.
    """
    try:
        return Sweep.model_validate(document.data)
    except ValidationError as error:
        problems.extend(schema_problems(error, document))
        return None


def schema_problems(error: ValidationError, document: Document) -> list[Problem]:
    """Convert a pydantic error to error messages with positions in the sweep file."""
    problems: list[Problem] = []
    # If a value may have several types, pydantic reports one error per type. The errors for one
    # value are joined into one message.
    expected: dict[tuple[Position, str], list[str]] = {}
    hints: dict[str, str] = {}
    for item in error.errors(include_url=False):
        if len(problems) + len(expected) >= ENOUGH:
            break
        path = _locate(item["loc"], document.data)
        if item["type"] == "missing":
            path = (*path, item["loc"][-1])
        dotted = ".".join(str(part) for part in path)
        if item["type"] == "extra_forbidden":
            what = f"unknown key {_shown(path[-1])}{nearest(str(path[-1]), _valid_keys(path))}"
            if path[0] == "slurm" and path[-1] in ("time", "timeout", "time_limit"):
                what = f"unknown key {_shown(path[-1])}; the key is resources.timeout_min"
            if path[0] == "tables" and path[-1] == "text":
                what = "tables have no key 'text'; use a template: aggregate.py --text TEMPLATE"
            if len(path) == 1 and path[0] in Blocks.model_fields:
                what = f"unknown key {_shown(path[0])}; it is a key of blocks"
            problems.append(Problem(document.at_key(path), what))
        elif item["type"] == "missing":
            problems.append(Problem(document.at(path[:-1]), f"{dotted} is required"))
        else:
            prefix = f"{dotted}: got {_shown(item['input'])}"
            hints[prefix] = EXAMPLES.get(path) or _other_section(path, item["input"])
            wanted = _expected(item)
            if path[0] in ("resources", "launch") or path[2:3] in (("resources",), ("launch",)):
                wanted = _of_reference(item, wanted)
            expected.setdefault((document.at(path), prefix), []).append(wanted)
    return problems + [
        Problem(position, f"{prefix}, expected {' or '.join(dict.fromkeys(wanted))}{hints[prefix]}")
        for (position, prefix), wanted in expected.items()
    ]


def _of_reference(item: Any, wanted: str) -> str:
    """Return `$PARAMETER` instead of text that describes the pattern of a reference.

    `item` is an element of `ValidationError.errors()`, and `wanted` is the text for it.
    """
    pattern = item.get("ctx", {}).get("pattern")
    is_reference = item["type"] == "string_type" or str(pattern).startswith(r"^\$")
    return "$PARAMETER" if is_reference else wanted


def _other_section(path: DataPath, value: Any) -> str:
    """Return a hint on the section to which a parameter's value belongs, or "" if there is none."""
    section = path[-2] if len(path) > 1 else None
    if section == "fixed" and isinstance(value, list):
        return "; a list of values goes in grid (every combination) or zip"
    if section in ("grid", "zip") and not isinstance(value, (list, dict)):
        return "; a single value goes in fixed"
    return ""


def _expected(item: Any) -> str:
    """Return text that says which values are valid at the place of a pydantic error.

    If the invalid value resembles a valid value, the text suggests the valid value.
    """
    text: str = item["msg"]
    for prefix in ("Input should be ", "Value error, "):
        text = text.removeprefix(prefix)
    text = text.replace("String should match pattern", "text that matches the pattern")
    text = re.sub(
        r"(List|Dictionary) should have at least 1 item.*",
        lambda found: f"a {'list' if found[1] == 'List' else 'mapping'} with at least 1 item",
        text,
    )
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", text)
    words = re.findall(r"'([^']*)'", item.get("ctx", {}).get("expected") or "")
    if isinstance(item["input"], str) and words:
        text += nearest(item["input"], words).split(" (valid")[0]
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _locate(loc: tuple[str | int, ...], data: Any) -> DataPath:
    """Convert the location in a pydantic error to a path in the data.

    A path is a tuple of keys and indices. If a field has a union type, the location also contains
    the name of a type. The path does not contain this name.
    """
    path: list[str | int] = []
    here = data
    for part in loc:
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    return tuple(path)


def _valid_keys(path: DataPath) -> list[str]:
    """Return the valid keys of a mapping in a sweep file, for an error message.

    `path` is that of an unknown key in the mapping.
    """
    models: dict[str, type[BaseModel]] = {
        "resources": Resources,
        "launch": Launch,
        "slurm": Slurm,
        "cases": Case,
        "tables": Table,
        "published": Published,
        "plots": Plot,
        "order": Shuffle,
        "blocks": Blocks,
        "sustained": Sustained,
    }
    names = [part for part in path[:-1] if isinstance(part, str)]
    model = models.get(names[-1], Sweep) if names else Sweep
    if model is not Sweep:
        return [field.alias or name for name, field in model.model_fields.items()]
    return sorted({*Sweep.model_fields, "base"} - {"filter"})


def value_check(benchmark: Benchmark) -> Check:
    """Return a function that checks one value of one parameter of the benchmark.

    The function takes the name of a parameter and a value. It returns an error message if the
    parameter cannot have this value, else None.
    """

    @cache
    def adapted(name: str) -> TypeAdapter[Any]:
        field = benchmark.params.model_fields[name]
        kind = field.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # models have a config
        return adapter(field, None if is_model else STRICT)

    def check(name: str, value: Any) -> str | None:
        try:
            adapted(name).validate_python(value)
        except ValidationError as error:
            for item in error.errors():
                if item["type"] == "reference":
                    return f"{name}: {item['msg']}"
            wanted = dict.fromkeys(_expected(item) for item in error.errors())
            return f"{name}: got {_shown(value)}, expected {' or '.join(wanted)}"
        return None

    return check


def literal_check(benchmark: Benchmark) -> Check:
    """Return a function that checks a plain value that is compared with a parameter.

    For example, 128 is the plain value in `seq_len == 128`. The function takes the name of the
    parameter and the value. It returns an error message if the parameter can never equal the value,
    else None. For an integer parameter, a whole number may be written as a float, such as 128.0.
    """
    check = value_check(benchmark)

    def checked(name: str, literal: Any) -> str | None:
        if isinstance(literal, float) and literal.is_integer() and not check(name, int(literal)):
            return None
        return check(name, literal)

    return checked


def valid_entries(document: Document, key: str, kind: Any) -> Iterator[tuple[DataPath, Any]]:
    """Yield the path and the value of each valid entry of a list in the sweep file.

    Args:
        kind: the type that an entry must have. Other entries are skipped, because `validate_schema`
            reports them.
    """
    items = document.data.get(key)
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    entry: TypeAdapter[Any] = TypeAdapter(kind, config=None if is_model else STRICT)
    for i, item in enumerate(items if isinstance(items, list) else []):
        try:
            yield (key, i), entry.validate_python(item)
        except ValidationError:
            continue


def run_scopes(
    document: Document, benchmarks: Benchmarks
) -> list[tuple[dict[str, Any], Benchmark]]:
    """Return the scopes of a sweep file that describe runs, each with its benchmark.

    The scopes are the entries of the key `cases`. If there are no cases, the only scope is the top
    level of the file.
    """
    cases = document.data.get("cases")
    scopes = [case for case in cases if isinstance(case, dict)] if isinstance(cases, list) else []
    return [(scope, benchmark_of(scope, benchmarks)) for scope in scopes or [document.data]]


def benchmark_of(scope: dict[str, Any], benchmarks: Benchmarks) -> Benchmark:
    """Return the benchmark of a case, or of the top level of a sweep file.

    The key `benchmark` names the benchmark. Without this key, the default benchmark of the sweep is
    returned.
    """
    name = scope.get("benchmark")
    return benchmarks.of(name if isinstance(name, str) else None)
