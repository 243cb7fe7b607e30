"""Computes predictions for a run with the function `predict` of its benchmark.

Tables can show predictions next to measurements. Runs that failed have predictions, too.
"""

from __future__ import annotations

import json

import numpy as np
from pydantic import ValidationError

from jobs.errors import TableError
from jobs.frame.metrics import Metric, fact_number
from jobs.run import Run
from jobs.sweep.benchmarks import NoBenchmark, benchmark_module
from systems.external.parameter import STORED


def predicted(run: Run, metric: Metric) -> np.ndarray | str | None:
    """Return the predicted value of a metric for a run.

    It is an array with one number in the unit of the metric, or a string if it is text. None if the
    benchmark does not predict this metric, or rejects the parameters of the run, which may be from
    an older version of the benchmark.

    Raises:
        TableError: if the benchmark does not exist, or if its function `predict` raises.
    """
    try:
        module = benchmark_module(run.benchmark)
        if not hasattr(module, "predict"):
            return None
        given = json.dumps(run.params)
        params = module.Params.model_validate_json(given, context={STORED: True})
    except NoBenchmark as error:
        raise TableError(str(error)) from error
    except ValidationError:
        return None
    try:
        found = module.predict(params)
    except Exception as error:
        raise TableError(f"{run.benchmark}: predict({params!r}) raised {error!r}") from error
    return fact_number(found, metric)
