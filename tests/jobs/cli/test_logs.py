"""`python -m jobs logs` shows the attempt and the repeat that failed."""

from __future__ import annotations

from pathlib import Path

from jobs.results.record_writer import RecordWriter
from tests.jobs.harness import call
from tests.jobs.results_folder import TOY, ResultsFolder, failed


def test_the_log_of_another_attempt_is_not_shown(tmp_path: Path) -> None:
    """The second repeat was not executed in its second attempt, because the first one failed."""
    folder = ResultsFolder(tmp_path / "out")
    manifest = folder.submit(TOY + "fixed: {size: 1}\nrepeats: 2\n", None)
    (run,) = manifest.runs.values()
    writer = RecordWriter(folder.path / "records", manifest.id)
    for attempt, status in ((1, "error"), (2, "wrong")):
        for repeat in (0, 1):
            log = manifest.job_folder(0) / f"{run.id}-{repeat}-{attempt}.log"
            executed = attempt == 1 or repeat == 0
            if executed:
                log.write_text(f"output of attempt {attempt}, repeat {repeat}\n")
            record = folder.record(manifest, run, repeat, failed(status))
            path = str(log.relative_to(folder.path)) if executed else None
            assert writer.write(record.model_copy(update={"attempt": attempt, "log": path}))
    shown = call("jobs", "logs", run.id, "--in", folder.path).stdout
    assert "-> wrong" in shown and "output of attempt 2, repeat 0" in shown, shown
    (manifest.job_folder(0) / f"{run.id}-0-2.log").unlink()
    shown = call("jobs", "logs", run.id, "--in", folder.path).stdout
    assert "-> wrong" in shown and "output of attempt" not in shown, shown
