"""Turns the errors of pydantic into messages with positions in the sweep file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from jobs.errors import ENOUGH, Position, Problem, nearest, shown

_Path = tuple[str | int, ...]


def wrong_value(name: str, value: Any, error: ValidationError) -> str:
    """Return the error message for a parameter that cannot have a value."""
    for item in error.errors():
        if item["type"] == "reference":
            return f"{name}: {item['msg']}"
    is_list = isinstance(value, str) and "," in value
    several = f"; several values are a list: {shown(f'[{value}]', 60)}" if is_list else ""
    return f"{name}: got {_shown(value)}, expected {expected(error)}{several}"


def expected(error: ValidationError, without: str = "") -> str:
    """Return which values are valid in place of a refused one, but for one text."""
    return _any_of(text for text in map(_expected, error.errors()) if text != without)


def problems_of(
    error: ValidationError, data: Any, at: Callable[[_Path, bool], Position], model: type[BaseModel]
) -> list[Problem]:
    """Convert the error with which `model` refused some data to messages with positions.

    `at` returns the position of the value at a path, or of its key.
    """
    problems: list[Problem] = []
    # If a value may have several types, pydantic reports one error per type. The errors for one
    # value are joined into one message.
    expected: dict[tuple[Position, str, str], list[str]] = {}
    for item in error.errors(include_url=False):
        if len(problems) + len(expected) >= ENOUGH:
            break
        path = _locate(item["loc"], data)
        if item["type"] == "extra_forbidden":
            problems.append(Problem(at(path, True), _unknown_key(path, model)))
        elif item["type"] == "missing":
            dotted = ".".join(map(str, (*path, item["loc"][-1])))
            problems.append(Problem(at(path, False), f"{dotted} is required"))
        else:
            at_key = item["loc"][-1] == "[key]"  # as pydantic marks errors in keys
            dotted = ".".join(map(str, path[:-1] if at_key else path))
            what = f"{dotted}: got {_shown(item['input'])}"
            place = (at(path, at_key), what, _hint(path, item["input"], model))
            expected.setdefault(place, []).append(_expected(item))
    return problems + [
        Problem(position, f"{what}, expected {_any_of(wanted)}{hint}")
        for (position, what, hint), wanted in expected.items()
    ]


def _unknown_key(path: _Path, model: type[BaseModel]) -> str:
    key = str(path[-1])
    what = f"unknown key {_shown(key)}"
    owner = next(_models_at(path[:-1], model), model)
    known = _keys(owner)
    if owner is model:  # the file that `base` names is merged before, and --where gives the filter
        known = sorted({*known, "base"} - {"filter"})
    return what + hint_for_key(key, known, model, path[:-1])


def hint_for_key(key: str, known: Iterable[str], model: type[BaseModel], path: _Path = ()) -> str:
    """Return a hint on a key that is not one of the `known` ones at a path from a model."""
    for section in known:
        if any(key in _keys(inner) for inner in _models_at((*path, section), model)):
            return f"; it is a key of {section}"
    return nearest(key, list(known))


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_at(path: _Path, model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models that the value at a path may be of, for a path from a model."""
    if not path:
        yield model
    elif isinstance(path[0], int):
        yield from _models_at(path[1:], model)
    elif path[0] in model.model_fields:
        for inner in _models_in(model.model_fields[path[0]].annotation):
            yield from _models_at(path[1:], inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _hint(path: _Path, value: Any, model: type[BaseModel]) -> str:
    """Return a hint on a value of the wrong type."""
    section = path[-2] if len(path) > 1 else None
    if section == "fixed" and isinstance(value, list):
        return "; a list of values goes in grid (every combination) or zip"
    if section in ("grid", "zip") and not isinstance(value, (list, dict)):
        return "; a single value goes in fixed"
    for owner in _models_at(path[:-1], model):
        field = owner.model_fields.get(str(path[-1]))
        if field and field.examples:
            return f", such as {field.examples[0]}"
    return ""


def _expected(item: ErrorDetails) -> str:
    """Return text that says which values are valid at the place of a pydantic error."""
    text = re.sub("^(Input should be|Value error,) ", "", item["msg"])
    text = text.replace("String should match pattern", "text that matches the pattern")
    text = re.sub("^List should have at least 1 item.*", "a list with at least 1 item", text)
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", text)
    words = re.findall(r"'([^']*)'", item.get("ctx", {}).get("expected") or "")
    if isinstance(item["input"], str) and words:
        text += nearest(item["input"], words).split(" (valid")[0]
    return text


def _any_of(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))


def _shown(value: Any) -> str:
    return shown(repr(value), 60)


def _locate(loc: _Path, data: Any) -> _Path:
    """Convert the location in a pydantic error to a path, without the types of a union."""
    path: list[str | int] = []
    here = data
    for part in loc:
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    return tuple(path)
