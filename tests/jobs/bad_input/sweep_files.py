"""Bad sweep files.

`REFUSED` has values that a key must not have. `CASES` has the other kinds of errors that
tests/jobs/sweep does not have.
"""

from __future__ import annotations

from tests.jobs.bad_input.case import ONE, PLAN, Case, Content, sweep

NOT_TEXT = ["5", "[a]"]
NOT_A_LIST = ["5", "a", "{a: 1}"]
NOT_A_MAPPING = ["null", "5", "[a]"]
NOT_A_COUNT = ["0", "1.5", "'3'", "true", "null", "[1]"]
NOT_ONE_LINE = ['"a\\nb"', '"a\\tb"', *NOT_TEXT]
# A line of a sweep file, in which # stands for a value of the key before it; the line must be
# refused with an error that names the key and has the place of the line.
REFUSED = {
    "name: #": ["null", "''", "a/b", "..", "x" * 101, '"a\\nb"', "größe", *NOT_TEXT],
    "benchmark: #": ["null", "''", "[toy]", "..toy", "os.path", "timing"],
    "description: #": NOT_TEXT,
    "fixed: #": [*NOT_A_MAPPING, "size"],
    "fixed: {size: #}": [*NOT_A_COUNT, "large", "{a: 1}"],
    "fixed: {size: 1, mode: #}": ["exakt", "Fast"],
    "fixed: {size: 1, scale: #}": ["big"],
    "fixed: {size: 1, causal: #}": ["1"],
    "fixed: {size: 1, label: #}": ["5", "a b"],
    "grid: {ranks: #}": ["5", "null", "[]", "[[5]]", "[{a: 1}]", "{from: 1, to: 8}"],
    "zip: #": NOT_A_MAPPING,
    "zip: {ranks: #}": ["1", "[]"],
    "cases: #": [*NOT_A_LIST, "[5]", "[null]"],
    "cases: [{benchmark: #}]": ["[a]", "attentoin"],
    "exclude: #": [*NOT_A_LIST, "[5]", "[[size, 1]]", "[{}]", "['']"],
    "repeats: #": NOT_A_COUNT,
    "order: #": ["random", "shuffle", "{}", "{shuffle: x}"],
    "runs_per_job: #": ["0", "all"],
    "timeout_s: #": ["0", "10m", "40000000", "false"],
    "resources: #": NOT_A_MAPPING,
    "resources: {nodes: #}": [*NOT_A_COUNT, "two", "$rank", "$", "$mode", "$scale"],
    "resources: {gpus_per_node: #}": ["-1"],
    "resources: {gpu_type: #}": ["h100:2"],
    "resources: {cpus_per_task: #}": ["0.5", "0"],
    "resources: {mem_gb: #}": ["64GB", "0", "0.0001", "$causal"],
    "resources: {timeout_min: #}": ["-5"],
    "resources: {exclusive: #}": ["1"],
    "launch: {nproc_per_node: #}": ["0", "$size.x", "$scale"],
    "slurm: {partition: #}": NOT_ONE_LINE,
    "slurm: {python: #}": ["''", '"a\\nb"'],
    "slurm: {array_parallelism: #}": NOT_A_COUNT,
    "slurm: {setup: #}": ["module load x", "[5]", '["a\\0b"]'],
    "slurm: {srun_args: #}": ["--label", '["a\\nb"]'],
    "slurm: {additional_parameters: #}": [
        *("[a]", "{a: [1]}", "{--mem: 1}", "{'a=b c': 1}", "{'': 1}", '{a: "x\\ny"}'),
        *('{"a\\nb": 1}', "{parsable: true}", "{test_only: true}", "{signal: USR1}"),
    ],
    "tables: [{name: t, title: #}]": NOT_TEXT,
    "tables: [{name: t, rows: #}]": ["size", "[1]", "[sise]", "[size, size]"],
    "tables: [{name: t, columns: #}]": ["{a: 1}", "[colour]"],
    "tables: [{name: t, value: #}]": ["5", "tme", "[]", "[time, time]", "fact.", "predicted.x"],
    "tables: [{name: t, unit: #}]": ["minutes", "GiB"],
    "tables: [{name: t, statistic: #}]": ["avg"],
    "tables: [{name: t, direction: #}]": ["up"],
    "tables: [{name: t, phase: #}]": ["5", "[forward, forward]"],
    "tables: [{name: t, where: #}]": ["5"],
    "tables: [{name: t, columns: [mode], baseline: #}]": [
        *("fast", "{}", "{mode: [fast]}", "{size: 1}"),
    ],
    "tables: [{name: t, benchmark: #}]": ["toy"],
    "tables: [{name: t, list: #}]": ["a..b"],
    "tables: [{name: t, list: a, limit: #}]": ["0"],
    "tables: [{name: t, published: #}]": ["flash.csv", "[{}]"],
    "plots: #": NOT_A_LIST,
    "plots: [{name: p, x: #}]": ["[size]", "sise"],
    "plots: [{name: p, x: size, series: #}]": ["mode", "[size]"],
    "plots: [{name: p, x: size, facet: #}]": ["[colour]"],
    "plots: [{name: p, x: size, value: #}]": ["[time]", "speed"],
    "blocks: #": ["5", "[a]"],
    "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: #}": [*NOT_A_COUNT, "1001"],
    "blocks: {interleave: [mode], baseline: {mode: fast}, margin: #}": ["0", "1", "2%"],
}
PUBLISHED = (
    "tables: [{name: t, rows: [size], published: [{file: %s, value: %s, on: {%s}, where: {%s}}]}]"
)
MIXED = "cases: [{}, {benchmark: tests.benchmarks.counter}]"
_FLASH = ("flash.csv", "source", "size: seq_len")
GRID = "grid: {size: [1, 2], mode: [fast, exact]}\n"
BLOCKS = "blocks: {interleave: [mode], baseline: {mode: fast}%s}"
_BLOCKS = [
    ("blocks: {interleave: [mood], baseline: {mood: a}}", "got 'mood'; did you mean 'mode'?"),
    ("blocks: {interleave: [mode], baseline: {size: 1}}", "got 'size' (valid: mode)"),
    ("blocks: {interleave: [mode], baseline: {mode: fsat}}", "4:47: blocks.baseline: no run has"),
    ("blocks: {interleave: [mode, causal], baseline: {causal: false}}", "got 2 runs (mode=fast ca"),
    (BLOCKS % ", rounds: 1, margin: 0.02", "blocks.margin requires at least 2 rounds"),
    (BLOCKS % ", sustained: {seconds: 3, where: sise == 2}", "did you mean 'size'?"),
    (BLOCKS % "" + "\nrepeats: 3", "repeats must be 1 together with blocks"),
    ("baseline: {mode: fast}", "unknown key 'baseline'; it is a key of blocks"),
]
_SIZES = str([*range(1, 1001)])
_CASES = [
    *((GRID + text, message) for text, message in _BLOCKS),
    (f"grid: {{size: {[*range(-40, 0)]}}}", "… and 10 more errors"),
    (ONE + "filter: size == 1", "sweep.yaml:4:1: 'filter' is not a key of a sweep file"),
    ("fixed: {size: [3]}", "a list of values goes in grid"),
    ("grid:\n  size: [1, 8]\n  window: [1, 2, 4]", "4:3: the window is larger than the size"),
    ("grid: {size: [1, 2]}\nexclude: [size > 0]", "no runs (2 left out by exclude)"),
    (f"grid: {{size: {_SIZES}, window: {_SIZES}, ranks: {_SIZES}}}", "at most 1000000 runs, got"),
    (
        "grid: {size: [1], ranks: [1, 2]}\nlaunch: {nproc_per_node: $ranks}\n"
        "blocks: {interleave: [ranks], baseline: {ranks: 1}}",
        "the same resources, got 1 node, 2 processes per node for ranks=2",
    ),
    (ONE + "cases: [{}, {resources: {nodes: 2}}]", "the same run is in cases.0"),
    (ONE + "cases: [{timeout_s: 5}, {timeout_s: 9}]", "the same run is in cases.0"),
    (ONE + "cases: [{resources: {mem_gb: 1.0e-9}}]", "cases.0.resources.mem_gb"),
    (ONE + "exclude: [{benchmark: toy}]", "has benchmark 'toy'"),
    (ONE + "exclude: ['window > 5']", "have no order"),
    *(
        (f"{ONE}tables: [{{name: t, {keys}}}]", message)
        for keys, message in (
            ("where: device == 1234567", "device: got 1234567, expected text; write it in quotes"),
            ("where: device == 4bb999b", "write 4bb999b in quotes"),
            ("where: devices == a", "'devices' is not a parameter; did you mean 'device'?"),
            ("columns: [device], baseline: {device: 7}", "device: got 7, expected text"),
        )
    ),
    (ONE + "tables: [{name: t}, {name: t}]", "'t' is used twice"),
    (ONE + "tables: [{name: t, limit: 5}]", "together with the key 'list'"),
    (ONE + PUBLISHED % ("../flash.csv", *_FLASH[1:], ""), "got '../flash.csv'"),
    (ONE + PUBLISHED % ("flahs.csv", *_FLASH[1:], ""), "did you mean 'flash.csv'?"),
    (ONE + PUBLISHED % ("flash.csv", "tme", "size: seq_len", ""), "no column 'tme'"),
    (ONE + PUBLISHED % ("flash.csv", "source", "mode: seq_len", ""), "'mode' is not one of"),
    (ONE + PUBLISHED % (*_FLASH, "colour: red"), "no column 'colour'"),
    (ONE + PUBLISHED % (*_FLASH, "seq_len: 7"), "no row with seq_len '7'"),
    # ---- several benchmarks
    ("fixed: {size: 1, dept: 2}\n" + MIXED, "have no parameter 'dept'; did you mean 'depth'?"),
    (ONE + "grid: {mode: [exact]}\n" + MIXED, "4:15: mode: got 'exact', expected 'fast' or 'slow'"),
    (ONE + "launch: {nproc_per_node: $ranks}\n" + MIXED, "name a parameter of benchmark 'te"),
]
BASE = "base: base.yaml\n"
_BASES = [
    sweep("base: no.yaml\n", "base: no.yaml: cannot be read: No such file"),
    sweep("base: sweeps/cpu/flsh.yaml\n", "did you mean 'sweeps/cpu/flash.yaml'?"),
    sweep("base: 5\n", "base must be a file name"),
    sweep('base: "a\\0b"\n', "a NUL character"),
    sweep(f"base: {'x' * 256}\n", "at most 255 bytes"),
    sweep(BASE, "sweep.yaml -> base.yaml -> sweep.yaml", base="base: sweep.yaml"),
    sweep(BASE, "base.yaml:1:9: not valid YAML", base="fixed: {"),
    sweep(BASE, "base.yaml:1:9: ", base="fixed: {sise: 1}"),
    sweep(BASE, "base.yaml:1:10: repeats", base=f"repeats: 0\n{ONE}"),
    sweep(BASE + "repeats: 0\n", "sweep.yaml:4:10: repeats", base=ONE),
]
_BENCHMARK_MODULES = [
    ("bad_raises", "1 / 0", "bad_raises/module.py:1)"),
    ("bad_syntax", "def run(", "SyntaxError: '(' was never closed"),
    ("bad_exits", "raise SystemExit(3)", "SystemExit: 3"),
    ("bad_import", "import no_such_module_x", "No module named 'no_such_module_x'"),
    ("bad_params", "Params = 5\ndef run(params): ...", "Params, a pydantic model"),
    (
        "bad_names",
        "import pydantic\nclass Params(pydantic.BaseModel):\n    phase: int = 1\n"
        "def run(params): ...",
        "'phase' must have another name",
    ),
]
_BENCHMARKS = [
    ("no_such_package.b", "No module named 'no_such_package'"),
    ("os.path.join", "no benchmark 'os.path.join'"),
    ("tests.benchmarks.tyo", "did you mean 'tests.benchmarks.toy'?"),
]
_FILES: list[tuple[str, str, dict[str, Content]]] = [
    ("no.yaml", "No such file or directory", {}),
    ("sweeps/flahs.yaml", "did you mean 'sweeps/flash.yaml'?", {}),
    ("own", "did you mean 'own.yaml'?", {"own.yaml": ""}),
    (".", "Is a directory", {}),
    ("empty.yaml", "name is required", {"empty.yaml": ""}),
    ("list.yaml", "list.yaml:1:1: the file must be a mapping", {"list.yaml": "- a\n"}),
    ("latin.yaml", "latin.yaml:1:10: byte 0xe9", {"latin.yaml": b"name: caf\xe9"}),
    ("é" * 128, "at most 255 bytes, got 256", {}),
    ("d/" * 2100, "at most 4095 bytes", {}),
    ("a\0b", "a NUL character", {}),
    ("a\udcff", "valid UTF-8", {}),
    ("", "must not be empty", {}),
]
CASES = [
    *(sweep(text, message) for text, message in _CASES),
    *_BASES,
    *(
        Case(
            ("jobs.submit", "sweep.yaml", *PLAN),
            message,
            {"sweep.yaml": f"name: a\nbenchmark: {name}.module\n", f"{name}/module.py": source},
        )
        for name, source, message in _BENCHMARK_MODULES
    ),
    *(sweep(f"benchmark: {name}\n", message, head="name: a\n") for name, message in _BENCHMARKS),
    *(Case(("jobs.submit", name, "--local"), message, files) for name, message, files in _FILES),
]
