"""Bad tables, plots and published figures in sweep files."""

from __future__ import annotations

from tests.jobs.bad_input.case import ONE, Case, sweep

_TABLES = [
    ("5", "tables: got 5, expected a valid list"),
    ("{name: t}", "tables: got {'name': 't'}, expected a valid list"),
    ("[t]", "tables.0: got 't', expected a mapping"),
    ("[{rows: [size]}]", "tables.0.name is required"),
    ("[{name: a/b}]", "tables.0.name: got 'a/b', expected text that matches the pattern"),
    ("[{name: t}, {name: t}]", "tables: the name 't' is used twice; names must be unique"),
    ("[{name: t, row: [size]}]", "unknown key 'row'; did you mean 'rows'?"),
    ("[{name: t, text: hello}]", "tables have no key 'text'; use a template"),
    ("[{name: t, title: [a]}]", "tables.0.title: got ['a'], expected a valid string"),
    ("[{name: t, rows: size}]", "tables.0.rows: got 'size', expected a valid list"),
    ("[{name: t, rows: [1]}]", "tables.0.rows.0: got 1, expected a valid string"),
    ("[{name: t, rows: [sise]}]", "rows: no parameter 'sise'; did you mean 'size'?"),
    ("[{name: t, rows: [size, size]}]", "rows: 'size' is already in rows"),
    ("[{name: t, rows: [size], columns: [size]}]", "columns: 'size' is already in rows"),
    ("[{name: t, columns: {a: 1}}]", "tables.0.columns: got {'a': 1}, expected a valid list"),
    ("[{name: t, value: tme}]", "value: 'tme' is not known; did you mean 'time'?"),
    ("[{name: t, value: []}]", "tables.0.value: got []"),
    ("[{name: t, value: [time, time]}]", "value: 'time' is listed twice"),
    ("[{name: t, value: fact.}]", "value: 'fact.' is not known"),
    ("[{name: t, value: predicted.x}]", "has no function predict(params)"),
    ("[{name: t, value: 5}]", "tables.0.value: got 5"),
    ("[{name: t, unit: minutes}]", "tables.0.unit: got 'minutes', expected 'us', 'ms', 's'"),
    ("[{name: t, unit: GiB}]", "time cannot be shown in GiB (valid: us, ms, s)"),
    ("[{name: t, value: mfu, unit: s}]", "mfu cannot be shown in s (valid: none; remove this key)"),
    ("[{name: t, value: fact.x, unit: s}]", "only names with the suffix _ms, _seconds or _bytes"),
    ("[{name: t, statistic: avg}]", "tables.0.statistic: got 'avg', expected 'median', 'mean'"),
    ("[{name: t, direction: up}]", "tables.0.direction: got 'up', expected 'lower' or 'higher'"),
    ("[{name: t, phase: 5}]", "tables.0.phase: got 5"),
    ("[{name: t, phase: [forward, forward]}]", "phase: 'forward' is listed twice"),
    ("[{name: t, where: 5}]", "tables.0.where: got 5, expected a valid string"),
    ("[{name: t, where: sise > 1}]", "'sise' is not a parameter; did you mean 'size'?"),
    ("[{name: t, where: size}]", "is not a comparison of a parameter"),
    ("[{name: t, where: window > 5}]", "compares null with 5, which have no order"),
    ("[{name: t, where: 'commit == 4bb999b4bb999b'}]", "write 4bb999b4bb999b in quotes"),
    ("[{name: t, where: \"commit == '4bb999b4bb'\"}]", "expected a value as in tables, such as"),
    ("[{name: t, where: 'host == 5'}]", "host: got 5, expected text; write it in quotes"),
    ("[{name: t, where: \"gpu == 'H200'\"}]", "the first 8 digits of the UUID"),
    ("[{name: t, baseline: fast}]", "tables.0.baseline: got 'fast', expected a mapping"),
    ("[{name: t, baseline: {}}]", "baseline must name a column and its value, got {}"),
    ("[{name: t, baseline: {mode: fast}}]", "'mode' is not one of the table's columns (columns: n"),
    ("[{name: t, columns: [mode], baseline: {mode: fsat}}]", "did you mean 'fast'?"),
    ("[{name: t, columns: [mode], baseline: {mode: [fast]}}]", "tables.0.baseline.mode: got ['fa"),
    (
        "[{name: t, columns: [value], value: [time, mfu], baseline: {value: mfu}}]",
        "columns of 'value' show different quantities",
    ),
    ("[{name: t, list: a..b}]", "tables.0.list: got 'a..b', expected text that matches"),
    ("[{name: t, list: a, value: time}]", "value: not allowed together with the key 'list'"),
    ("[{name: t, list: a, rows: [phase]}]", "rows: no parameter 'phase'"),
    ("[{name: t, limit: 5}]", "limit: only allowed together with the key 'list'"),
    ("[{name: t, list: a, limit: 0}]", "tables.0.limit: got 0"),
    ("[{name: t, benchmark: toy}]", "benchmark: no run of this sweep has benchmark 'toy'"),
    # ---- published figures
    (
        "[{name: t, published: flash.csv}]",
        "tables.0.published: got 'flash.csv', expected a valid l",
    ),
    ("[{name: t, published: [{}]}]", "tables.0.published.0.file is required"),
    (
        "[{name: t, rows: [size], published: [{file: ../flash.csv, value: a, on: {size: b}}]}]",
        "tables.0.published.0.file: got '../flash.csv'",
    ),
    (
        "[{name: t, rows: [size], published: [{file: flahs.csv, value: a, on: {size: b}}]}]",
        "no file of published figures 'flahs.csv'; did you mean 'flash.csv'?",
    ),
    (
        "[{name: t, rows: [size], published: [{file: flash.csv, value: tme, on: {size: dtype}}]}]",
        "flash.csv has no column 'tme'",
    ),
    (
        "[{name: t, rows: [size], published: [{file: flash.csv, value: source, on: {size: len}}]}]",
        "flash.csv has no column 'len'",
    ),
    (
        "[{name: t, published: [{file: flash.csv, value: source, on: {size: seq_len}}]}]",
        "on: 'size' is not one of the table's rows (rows: none)",
    ),
    (
        "[{name: t, published: [{file: flash.csv, value: source, on: {}}]}]",
        "a mapping with at least 1 item",
    ),
    (
        "[{name: t, rows: [size], published: [{file: flash.csv, value: source, "
        "on: {size: seq_len}, where: {colour: red}}]}]",
        "flash.csv has no column 'colour'",
    ),
    (
        "[{name: t, rows: [size], published: [{file: flash.csv, value: source, "
        "on: {size: seq_len}, where: {seq_len: 7}}]}]",
        "flash.csv has no row with seq_len '7'",
    ),
]
_PLOTS = [
    ("p", "plots: got 'p', expected a valid list"),
    ("[{name: p}]", "plots.0.x is required"),
    ("[{x: size}]", "plots.0.name is required"),
    ("[{name: p, x: sise}]", "x: no parameter 'sise'; did you mean 'size'?"),
    ("[{name: p, x: [size]}]", "plots.0.x: got ['size'], expected a valid string"),
    ("[{name: p, x: size, series: mode}]", "plots.0.series: got 'mode', expected a valid list"),
    ("[{name: p, x: size, series: [size]}]", "series: 'size' is already in x"),
    ("[{name: p, x: size, facet: [colour]}]", "facet: no parameter 'colour'"),
    ("[{name: p, x: size, rows: [mode]}]", "unknown key 'rows'"),
    ("[{name: p, x: size, value: [time]}]", "plots.0.value: got ['time'], expected a valid string"),
    ("[{name: p, x: size, value: speed}]", "value: 'speed' is not known"),
    ("[{name: p, x: size, where: size >}]", "'size >' is not a comparison"),
    ("[{name: p, x: size}, {name: p, x: ranks}]", "plots: the name 'p' is used twice"),
]
CASES: list[Case] = [
    *(sweep(f"{ONE}tables: {text}\n", message) for text, message in _TABLES),
    *(sweep(f"{ONE}plots: {text}\n", message) for text, message in _PLOTS),
]
