"""Statuses of records."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from jobs.results.record import RecordedStatus
from jobs.status import Status


@pytest.mark.parametrize("status", ["queued", "running", "unknown", "missing", "not_needed"])
def test_a_record_cannot_have_the_status_of_a_run_without_one(status: str) -> None:
    adapter: TypeAdapter[Status] = TypeAdapter(RecordedStatus)
    with pytest.raises(ValidationError, match=f"status of a record.*got {status}"):
        adapter.validate_python(status)
