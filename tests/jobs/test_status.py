"""Properties of run statuses."""

from __future__ import annotations

import pytest

from jobs.status import Status

INTERRUPTED = {"can_be_recorded", "is_failure", "runs_again_on_submit", "runs_again_in_its_job"}


@pytest.mark.parametrize(
    ("status", "follows"),
    [
        ("ok", {"can_be_recorded"}),
        ("oom", {"can_be_recorded", "runs_again_on_retry"}),
        ("timeout", {"can_be_recorded", "is_failure", "runs_again_on_retry"}),
        ("error", {"can_be_recorded", "is_failure", "runs_again_on_retry"}),
        ("wrong", {"can_be_recorded", "is_failure", "runs_again_on_retry"}),
        ("unsupported", {"can_be_recorded"}),
        ("killed", {"can_be_recorded", "is_failure", "runs_again_on_submit"}),
        ("preempted", INTERRUPTED),
        ("cancelled", INTERRUPTED),
        ("queued", {"is_live"}),
        ("running", {"is_live"}),
        ("missing", {"is_failure", "runs_again_on_submit"}),
    ],
)
def test_what_follows_from_a_status(status: str, follows: set[str]) -> None:
    properties = (
        "can_be_recorded",
        "is_failure",
        "is_live",
        "runs_again_on_submit",
        "runs_again_on_retry",
        "runs_again_in_its_job",
    )
    assert {name for name in properties if getattr(Status(status), name)} == follows


def test_a_record_cannot_have_the_status_of_a_run_without_one() -> None:
    from pydantic import TypeAdapter, ValidationError

    from jobs.results.record import RecordedStatus

    adapter: TypeAdapter[Status] = TypeAdapter(RecordedStatus)
    for status in Status:
        if status.can_be_recorded:
            assert adapter.validate_python(status) is status
        else:
            with pytest.raises(ValidationError, match=f"status of a record.*got {status}"):
                adapter.validate_python(status)
