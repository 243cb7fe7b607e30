"""Computes what a benchmark's function `predict` expects of a run.

Tables show predictions next to measurements, also for runs that failed.
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
    """Predict a metric of a run.

    Returns:
        An array with one number, in the metric's unit; or a string; or None if the benchmark does
        not predict this metric.

    Raises:
        TableError: if the benchmark does not exist here, or if its `predict` raises.
    """
    return fact_number(_prediction(run.benchmark, json.dumps(run.params)), metric)


def _prediction(benchmark: str, params_json: str) -> Any:
    """Return all predictions of a benchmark for a run.

    They are empty if the benchmark has no `predict`, or does not accept these parameters, which may
    be those of an older version.
    """
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
