"""Asks a benchmark's `predict` what to expect of a run.

Tables show it beside what was measured, or instead of it where the run ran out of memory.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from pydantic import ValidationError

from jobs.errors import TableError
from jobs.report.metrics import Metric, fact_number
from jobs.run import Run
from jobs.sweep.benchmarks import benchmark_module


def predicted(run: Run, metric: Metric) -> np.ndarray | str | None:
    """Predict a metric of a run; None where nothing of this name is predicted.

    Raises:
        TableError: there is no such benchmark here, or its `predict` raised.
    """
    return fact_number(_prediction(run.benchmark, json.dumps(run.params)), metric)


def _prediction(benchmark: str, params_json: str) -> Any:
    """All that is predicted; nothing for parameters that this version no longer takes."""
    try:
        module = benchmark_module(benchmark)
        if not hasattr(module, "predict"):
            return {}
        params = module.Params.model_validate_json(params_json)
    except LookupError as error:
        raise TableError(str(error)) from error
    except ValidationError:
        return {}
    try:
        return module.predict(params)
    except Exception as error:
        raise TableError(f"{benchmark}: predict({params!r}) raised {error!r}") from error
