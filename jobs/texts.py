"""The text under a table: a Jinja2 template that takes its numbers from the records.

    {{ value("time", phase="forward", size="xl") | n }} ms, of which {{ state(size="2.7b") }} ...

What is not there (a run that failed, or is missing) is `not measured` through all arithmetic, so a
report stands whatever became of its runs. A wrong name is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from jobs.conditions import Check, nearest
from jobs.entries import Entry, part, selected
from jobs.expand import Run, varying
from jobs.published import figure
from jobs.schema import NAMED, STATISTICS, VALUES, Table, TableError, plain
from jobs.status import Observation
from jobs.tables import Cell, add
from jobs.values import phases, shown, statistic, value_named

# Only those that leave what is not measured as it is: `int` would make it 0.
_FILTERS = ("abs", "capitalize", "join", "lower", "replace", "round", "sum", "trim", "upper")
_FUNCTIONS = ("value", "state", "published", "max", "min")
_KEYWORDS = ("phase", "statistic", "unit")  # of value(); all others are parameters
_PSEUDO = ("device", "repeat")


class NotMeasured:
    """Stands for a number that there is none of, through all arithmetic and every filter."""

    def __str__(self) -> str:
        return "not measured"

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> NotMeasured:
        return self

    def _compared(self, _: Any) -> NoReturn:
        raise _Compared

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _same
    __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = __getitem__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared  # type: ignore[assignment]


class _Compared(Exception):
    """A text that says how two compare can say nothing where one is not there."""


def _of_all(choose: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """max or min, of numbers or of one list of them, of which there is none where one of the
    numbers is not there."""

    def chosen(*numbers: Any) -> Any:
        if len(numbers) == 1 and isinstance(numbers[0], list):
            numbers = tuple(numbers[0])
        missing = [number for number in numbers if isinstance(number, NotMeasured)]
        return missing[0] if missing else choose(numbers)

    return chosen


def _n(number: Any, digits: int = 4) -> str:
    """A number with this many significant digits."""
    return shown(number, digits) if isinstance(number, (int, float)) else str(number)


def _pct(number: Any, digits: int = 3) -> str:
    """A share as percent: 0.1234 is 12.3%."""
    return f"{shown(100 * number, digits)}%" if isinstance(number, (int, float)) else str(number)


def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        undefined=StrictUndefined,
        finalize=lambda told: shown(told) if isinstance(told, float) else told,
    )
    kept = {name: environment.filters[name] for name in _FILTERS}
    environment.filters = kept | {"n": _n, "pct": _pct}
    environment.globals = {"range": environment.globals["range"]}
    environment.globals |= {"max": _of_all(max), "min": _of_all(min), "dict": dict}
    return environment


# ---- before anything runs ------------------------------------------------------------------------


def text_problems(text: str, fields: list[str], check: Check) -> list[str]:
    """What is wrong with a text as far as it can be told without records: its syntax, names of
    functions, filters, values and parameters, and values that a parameter cannot have."""
    environment = _environment()
    try:
        tree = environment.parse(text)
        environment.compile(text)  # knows the filters
    except TemplateSyntaxError as error:
        return [f"text: line {error.lineno}: {error.message}"]
    names = sorted(meta.find_undeclared_variables(tree) - {*_FUNCTIONS, *environment.globals})
    found = [f"text: no function {name!r}{nearest(name, _FUNCTIONS)}" for name in names]
    for name, call in _calls(tree):
        first = call.args[0] if call.args else None
        wrong = []
        if name == "value" and isinstance(first, nodes.Const):
            wrong.append(_unknown_value(str(first.value)))
        for keyword in call.kwargs:
            wrong.append(_wrong_keyword(name, keyword, fields, check))
        found += [f"text: line {call.lineno}: {what}" for what in wrong if what]
    return found


def ambiguities(text: str, runs: list[Run]) -> list[str]:
    """Where a text whose syntax is right asks for one run, and several of these would fit."""
    found = []
    for name, call in _calls(_environment().parse(text)):
        given = {k.key: k.value for k in call.kwargs if name == "state" or k.key not in _KEYWORDS}
        params = {k: v.value for k, v in given.items() if isinstance(v, nodes.Const)}
        dynamic = call.dyn_args is not None or call.dyn_kwargs is not None
        if dynamic or len(params) < len(given) or "device" in params:
            continue
        params.pop("repeat", None)
        fit = [run for run in runs if params.items() <= run.params.items()]
        if len(fit) > 1:
            found.append(f"text: line {call.lineno}: {name}(): {_several(fit, params)}")
    return found


def _calls(tree: nodes.Template) -> Iterator[tuple[str, nodes.Call]]:
    """Each place that asks for a run."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in ("value", "state"):
            yield call.node.name, call


def _several(runs: list[Run], params: dict[str, Any], devices: Iterable[str] = ()) -> str | None:
    """That parameters fit several runs, and what would tell these apart; None if they do not."""
    differ = {name: [plain(run.params[name]) for run in runs] for name in varying(runs)}
    if len(set(devices)) > 1:
        differ["device"] = list(devices)
    if not differ:
        return None
    listed = "; ".join(f"{name}: {', '.join(dict.fromkeys(has))}" for name, has in differ.items())
    return f"{len(runs)} runs have {_told(params)}; they differ in {listed}"


def _told(params: dict[str, Any]) -> str:
    return ", ".join(f"{name}={plain(given)}" for name, given in params.items()) or "any kind"


def _unknown_value(name: str) -> str | None:
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"value {name!r} is not known{hint}"


def _wrong_keyword(
    function: str, keyword: nodes.Keyword, fields: list[str], check: Check
) -> str | None:
    """Why a function cannot be given this."""
    given = keyword.value.value if isinstance(keyword.value, nodes.Const) else None
    if function == "value" and keyword.key in _KEYWORDS:
        wrong = keyword.key == "statistic" and given is not None and given not in _ONE_NUMBER
        return f"no statistic {given!r}{nearest(str(given), _ONE_NUMBER)}" if wrong else None
    if keyword.key in _PSEUDO:
        return None
    if keyword.key not in fields:
        return f"no parameter {keyword.key!r}{nearest(keyword.key, fields)}"
    return check(keyword.key, given) if isinstance(keyword.value, nodes.Const) else None


_ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]


# ---- with records --------------------------------------------------------------------------------


def render_text(
    observation: Observation, view: Table, chosen: list[Entry], told: Callable[[str], None]
) -> str:
    """A table's text with its numbers.

    Args:
        chosen: every run of the folder; the table's own `where` does not hold for its text.
        told: is called with what a reader of the report should know, such as a run that no sweep
            of the folder has.

    Raises:
        TableError: a name that is not known, or several runs where one is wanted.
    """
    runs = selected(observation, view.model_copy(update={"where": None}), chosen)
    numbers = _Numbers(runs, told)
    template = _environment().from_string(view.text or "")
    functions = {"value": numbers.value, "state": numbers.state, "published": _published}
    try:
        return template.render(functions).strip()
    except _Compared:
        return "Not all of what this text compares is measured."
    except TemplateSyntaxError as error:
        raise TableError(f"text: line {error.lineno}: {error.message}") from error
    except (TemplateError, TableError, TypeError, ValueError, ArithmeticError) as error:
        raise TableError(f"text: {_line_of(error)}{error}") from error


def _line_of(error: Exception) -> str:
    """Which line of the text raised an error."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":  # as Jinja names a text
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _published(file: str, column: str, **where: Any) -> Any:
    """The one figure of others for which these columns hold, as a number where it is one."""
    found = figure(file, column, **where)
    if found is None:
        raise TableError(f"{file} has no {column} of {_told(where)}")
    try:
        return float(found)
    except ValueError:
        return found


class _Numbers:
    """What a text may ask of the records."""

    def __init__(self, runs: list[Entry], told: Callable[[str], None]):
        self.runs = runs
        self.told = told

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """A number, as a table with this value shows it, of the one run with these parameters."""
        wrong = _unknown_value(name)
        if wrong:
            raise TableError(wrong)
        if statistic not in _ONE_NUMBER:
            raise TableError(f"no statistic {statistic!r}{nearest(statistic, _ONE_NUMBER)}")
        repeats = self._pick(f"value({name!r})", params)
        cell = Cell(value_named(name, unit))
        for entry in repeats:
            add(cell, entry, phase or self._phase(name, entry))
        if not cell.samples:
            texts = [text for text in cell.texts if text != "–"]
            return texts[0] if texts else NotMeasured()
        return _number(cell, statistic)

    def state(self, **params: Any) -> str:
        """What became of the one run with these parameters: ok where any repeat is."""
        states = [entry.state for entry in self._pick("state()", params)]
        return "ok" if "ok" in states else (states or ["missing"])[0]

    def _phase(self, name: str, entry: Entry) -> str:
        """The only phase that a run has this value for."""
        measured = entry.record.measurements if entry.record else None
        if measured is None or not value_named(name).has_phases:
            return ""
        found = phases(measured, name)
        if len(found) > 1:
            raise TableError(f"value({name!r}): which phase? there are {', '.join(found)}")
        return found[0] if found else ""

    def _pick(self, asked: str, params: dict[str, Any]) -> list[Entry]:
        """The repeats of the one run that has these parameters; none where no run has."""
        known = [*dict.fromkeys(key for entry in self.runs for key in entry.run.params), *_PSEUDO]
        for name in params:
            if name not in known:
                raise TableError(f"{asked}: no parameter {name!r}{nearest(name, known)}")
        found = [
            entry
            for entry in self.runs
            if all(part(entry, name) == given for name, given in params.items())
        ]
        if not found:
            self.told(f"text: {asked}: no run has {_told(params)}")
        runs = list({entry.run.id: entry.run for entry in found}.values())
        several = _several(runs, params, [entry.device for entry in found])
        if several:
            raise TableError(f"{asked}: {several}")
        return found


def _number(cell: Cell, name: str) -> float:
    return statistic(np.concatenate(cell.samples), name)
