"""The text under a table: a Jinja2 template that takes its numbers from the records.

    {{ value("time", phase="forward", size="xl") | n }} ms, of which {{ state(size="2.7b") }} ...

What is not there (a run that failed, or is missing) is `not measured` through all arithmetic, so a
report stands whatever became of its runs. A wrong name is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from jobs.conditions import Check, nearest
from jobs.entries import Entry, coordinate, selected
from jobs.expand import Run, varying
from jobs.published import figure
from jobs.schema import STATISTICS, Table, TableError, plain, units_of
from jobs.status import Observation
from jobs.tables import Cell
from jobs.validate import unknown_value
from jobs.values import measured_phases, phases, shown, value_named

# Only those that leave what is not measured as it is: `int` would make it 0.
_FILTERS = ("abs", "capitalize", "join", "lower", "replace", "round", "sum", "trim", "upper")
_ASKING = ("value", "state", "published")
_FUNCTIONS = (*_ASKING, "max", "min")
_ONE_NUMBER = [name for name in STATISTICS if name != "mean_std"]
_PSEUDO = ("device", "repeat")  # beside a run's parameters
_TAKES_IN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_RAISED = (
    TemplateError, TableError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
)  # by what stands in a text  # fmt: skip


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
    functions, filters, values and parameters, values that a parameter cannot have, figures that
    nobody published.

    Args:
        fields: the benchmark's parameters.
        check: why one of them cannot have a value.
    """
    environment = _environment()
    try:
        tree = environment.parse(text)
        environment.compile(text)  # knows the filters
        names = meta.find_undeclared_variables(tree) - {*_FUNCTIONS, *environment.globals}
    except TemplateSyntaxError as error:
        return [f"text: line {error.lineno}: {error.message}"]
    except (RecursionError, SyntaxError):  # as Python's own parser has it
        return ["text: nested too deeply"]
    except ValueError as error:  # of a constant, 10 ** (10 ** 5)
        return [f"text: {error}"]
    found = [f"text: no function {name!r}{nearest(name, _FUNCTIONS)}" for name in sorted(names)]
    for other in tree.find_all(_TAKES_IN):
        found.append(f"text: line {other.lineno}: a text cannot take in another")
    for name, call in _calls(tree):
        wrong = _wrong(name, call, fields, check)
        found += [f"text: line {call.lineno}: {what}" for what in wrong]
    return found


def ambiguities(text: str, runs: list[Run]) -> list[str]:
    """Where a text in which `text_problems` found nothing asks for one run, and several of these
    would fit."""
    found = []
    for name, call in _calls(_environment().parse(text)):
        _, given = _arguments(name, call)
        params = _constants(given)
        if name == "published" or _is_open(call) or len(params) < len(given) or "device" in params:
            continue
        params.pop("repeat", None)
        fit = [run for run in runs if params.items() <= run.params.items()]
        if len(fit) > 1:
            found.append(f"text: line {call.lineno}: {name}(): {_several(fit, params)}")
    return found


def _calls(tree: nodes.Template) -> Iterator[tuple[str, nodes.Call]]:
    """Each place that asks for a number or a state, and the function that it calls."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in _ASKING:
            yield call.node.name, call


def _is_open(call: nodes.Call) -> bool:
    """Whether a call has more arguments than can be seen: `*` or `**` something."""
    return call.dyn_args is not None or call.dyn_kwargs is not None


def _arguments(name: str, call: nodes.Call) -> tuple[dict[str, nodes.Expr], dict[str, nodes.Expr]]:
    """By name, the arguments that a function declares, and all others: those that a run or a row
    is to have.

    Raises:
        TypeError: one is missing, or there are too many.
    """
    function = inspect.signature(_Numbers([], lambda _: None).functions[name])
    bind = function.bind_partial if _is_open(call) else function.bind
    declared = bind(*call.args, **{given.key: given.value for given in call.kwargs}).arguments
    return declared, declared.pop("params", {})


def _constants(given: dict[str, nodes.Expr]) -> dict[str, Any]:
    """Those that are the same whatever was measured."""
    found = {}
    for name, node in given.items():
        try:
            found[name] = node.as_const()
        except nodes.Impossible:
            continue
    return found


def _wrong(name: str, call: nodes.Call, fields: list[str], check: Check) -> list[str]:
    """What is wrong with a call's arguments, as far as they can be seen."""
    try:
        declared, given = _arguments(name, call)
    except TypeError as error:
        return [f"{name}(): {error}"]
    known, params = _constants(declared), _constants(given)
    if name == "published":
        whole = len(known) + len(params) == len(declared) + len(given)
        return _unpublished(known, params) if whole and not _is_open(call) else []
    known.pop("phase", None)  # only records tell which there are
    if "name" not in known:
        known |= {"name": "time", "unit": None}  # of whatever value, the statistic must be one
    found = [_wrong_value(**known)]
    for param in given:
        if param not in (*fields, *_PSEUDO):
            found.append(f"no parameter {param!r}{nearest(param, fields)}")
        elif param in fields and param in params:
            found.append(check(param, params[param]))
    return [what for what in found if what]


def _unpublished(known: dict[str, Any], params: dict[str, Any]) -> list[str]:
    """Why there is no one figure of others like this."""
    try:
        _published(**known, **params)
    except TableError as error:
        return [str(error)]
    return []


def _wrong_value(name: Any, statistic: Any = "median", unit: Any = None) -> str | None:
    """Why a text cannot have a value in this statistic and unit."""
    unknown = unknown_value(str(name))
    if unknown:
        return f"value {unknown}"
    if statistic not in _ONE_NUMBER:
        return f"no statistic {statistic!r}{nearest(str(statistic), _ONE_NUMBER)}"
    if unit is not None and unit not in units_of(name):
        valid = ", ".join(units_of(name)) or "none but its own"
        return f"value {name!r} cannot be shown in {unit!r} (valid: {valid})"
    return None


def _several(runs: list[Run], params: dict[str, Any], devices: Iterable[str] = ()) -> str | None:
    """That parameters fit several runs, and what would tell these apart; None if they do not."""
    differ = {name: [plain(run.params[name]) for run in runs] for name in varying(runs)}
    if len(set(devices)) > 1:
        differ["device"] = list(devices)
    if not differ:
        return None
    listed = "; ".join(f"{name}: {', '.join(dict.fromkeys(has))}" for name, has in differ.items())
    which = (
        f"{len(runs)} runs have {_told(params)}" if params else f"it may be any of {len(runs)} runs"
    )
    return f"{which}; they differ in {listed}"


def _told(params: dict[str, Any]) -> str:
    return ", ".join(f"{name}={plain(given)}" for name, given in params.items()) or "any kind"


# ---- with records --------------------------------------------------------------------------------


def render_text(
    observation: Observation, view: Table, chosen: list[Entry], warn: Callable[[str], None]
) -> str:
    """A table's text with its numbers.

    Args:
        chosen: every run of the folder; the table's own `where` does not hold for its text.
        warn: is called with what whoever makes the report should know, such as a run that no sweep
            of the folder has.

    Raises:
        TableError: a name that is not known, or several runs where one is wanted.
    """
    runs = selected(observation, view.model_copy(update={"where": None}), chosen)
    try:
        template = _environment().from_string(view.text or "")
        return template.render(_Numbers(runs, warn).functions).strip()
    except _Compared:
        return "Not all of what this text compares is measured."
    except TemplateSyntaxError as error:
        raise TableError(f"text: line {error.lineno}: {error.message}") from error
    except _RAISED as error:
        raise TableError(f"text: {_line_of(error)}{error}") from error


def _line_of(error: Exception) -> str:
    """Which line of the text raised an error."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":  # as Jinja names a text
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _published(file: str, column: str, **params: Any) -> Any:
    """The one figure of others for which these columns hold, as a number where it is one."""
    found = figure(str(file), str(column), **params)
    if found is None:
        raise TableError(f"{file} has no {column} of {_told(params)}")
    try:
        return float(found)
    except ValueError:
        return found


class _Numbers:
    """What a text may ask of the records."""

    def __init__(self, runs: list[Entry], warn: Callable[[str], None]):
        self.runs = runs
        self.warn = warn

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """By name, what a text calls; `params` are what the run, or the row, is to have."""
        return {"value": self.value, "state": self.state, "published": _published}

    def value(
        self,
        name: str,
        phase: str | None = None,
        statistic: str = "median",
        unit: str | None = None,
        **params: Any,
    ) -> Any:
        """A number, as a table with this value shows it, of the one run with these parameters."""
        wrong = _wrong_value(name, statistic, unit)
        if wrong:
            raise TableError(wrong)
        cell = Cell(value_named(name, unit))
        for entry in self._pick(f"value({name!r})", params):
            cell.add(entry, self._phase(name, entry, phase))
        number = cell.number(statistic)
        if number is None:
            texts = [text for text in cell.texts if text != "–"]
            return texts[0] if texts else NotMeasured()
        return number

    def state(self, **params: Any) -> str:
        """What became of the one run with these parameters: ok where any repeat is."""
        states = [entry.state for entry in self._pick("state()", params)]
        return "ok" if "ok" in states else (states or ["missing"])[0]

    def _phase(self, name: str, entry: Entry, given: str | None) -> str:
        """The phase that is given, or else the only one that a run has this value for."""
        measured = entry.record.measurements if entry.record else None
        if measured is None or not value_named(name).has_phases:
            return given or ""
        if given:
            has = measured_phases(measured)
            if given not in has:
                self.warn(f"text: value({name!r}): no phase {given!r}{nearest(given, has)}")
            return given
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
            if all(coordinate(entry, name) == given for name, given in params.items())
        ]
        if not found:
            self.warn(f"text: {asked}: no run has {_told(params)}")
        runs = list({entry.run.id: entry.run for entry in found}.values())
        several = _several(runs, params, [entry.device for entry in found])
        if several:
            raise TableError(f"{asked}: {several}")
        return found
