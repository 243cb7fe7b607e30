"""Asks Slurm which jobs it has. Only a clear answer counts.

squeue may fail without an exit code, print nothing or only a part, or time out. Then it is unknown
whether a job is queued or running. A job is gone only if squeue says that it does not know it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from subprocess import CompletedProcess

from jobs.formatting import on_one_line
from jobs.results.slurm_job import QueuedJob, SlurmJob
from jobs.slurm_client import SlurmSilent, configuration, slurm_client

# Time in which Slurm may still accept a job after a call of sbatch, in seconds. If the submit
# command is killed, sbatch may go on for two minutes, for example while Slurm has too many jobs.
UNCONFIRMED_S = 180.0
_NEXT, _END = "\x1f", "\x1e"  # after each field and each job; not in names and comments
_FORMAT = _NEXT.join(["%A", "%F", "%K", "%U", "%V", "%T", "%r", "%j", "%k"]) + _END


@dataclass(frozen=True)
class Answer:
    """What Slurm says about a job. By default, that it no longer knows the job."""

    found: QueuedJob | None = None
    unknown: str = ""  # why Slurm does not say whether it knows the job
    other: str = ""  # which other job has the id of the job


def ask(jobs: Iterable[SlurmJob]) -> dict[SlurmJob, Answer]:
    """Ask Slurm for some jobs, on each cluster to which they were submitted."""
    answers: dict[SlurmJob, Answer] = {}
    by_cluster: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        by_cluster.setdefault(job.cluster, []).append(job)
    for cluster, group in by_cluster.items():
        remote = False
        try:
            here = configuration()
            remote = cluster not in ("", here.get("ClusterName"))
            there = configuration(cluster) if remote else here
            queue = _Queue(cluster if remote else "", "jobs" in there.get("PrivateData", ""))
            answers |= queue.ask(group)
        except SlurmSilent as error:
            why = str(error)
            if remote:
                why = f"on cluster {cluster}, which cannot be asked from here; log in there"
            answers |= {job: Answer(unknown=why) for job in group}
    return answers


class _Queue:
    """The queue of one cluster."""

    def __init__(self, cluster: str, is_private: bool):
        self.cluster = cluster  # "": that of this host
        self.is_private = is_private  # whether users see only their own jobs

    def ask(self, jobs: list[SlurmJob]) -> dict[SlurmJob, Answer]:
        """Return what the cluster says about jobs. Raises SlurmSilent if it does not answer."""
        numbers = sorted({job.id.split("_")[0] for job in jobs if job.id is not None})
        by_id: dict[str, QueuedJob] = {}
        for start in range(0, len(numbers), 1000):  # the length of a command line is limited
            by_id |= {one.id: one for one in self._list("-j", numbers[start : start + 1000])}
        listed = {str(one.number) for one in by_id.values()}
        gone = {number: self._is_gone(number) for number in numbers if number not in listed}
        by_token: dict[tuple[str, int | None], QueuedJob] = {}
        for user in {job.user for job in jobs if job.id is None}:
            by_token |= {(one.token, one.element): one for one in self._list("-u", [str(user)])}
        return {job: self._answer(job, by_id, gone, by_token) for job in jobs}

    def _answer(
        self,
        job: SlurmJob,
        by_id: Mapping[str, QueuedJob],
        gone: Mapping[str, bool],
        by_token: Mapping[tuple[str, int | None], QueuedJob],
    ) -> Answer:
        if job.id is None:
            found = by_token.get((job.token, job.element))
        else:
            found = by_id.get(job.id)
            if found is not None and not job.is_same(found):
                other = f"its number now belongs to job {found.name!r} of user {found.user}"
                return Answer(other=other)
        if found is not None:
            return Answer(found)
        if self.is_private and job.user not in (None, os.getuid()):
            return Answer(unknown=f"Slurm shows the jobs of user {job.user} only to that user")
        if job.id is None and time.time() - job.since < UNCONFIRMED_S:
            minutes = f"{UNCONFIRMED_S / 60:.0f} minutes"
            return Answer(unknown=f"sbatch was interrupted; Slurm may show the job in {minutes}")
        if job.id is not None and not gone.get(job.id.split("_")[0], True):
            return Answer(unknown=f"Slurm does not answer: 'squeue' says nothing of job {job.id}")
        return Answer()

    def _is_gone(self, number: str) -> bool:
        """Return whether squeue says that it does not know a job. Only then it is an error."""
        return "Invalid job id" in self._squeue("-j", number).stderr

    def _list(self, option: str, values: list[str]) -> Iterator[QueuedJob]:
        done = self._squeue(option, ",".join(values))
        *lines, rest = done.stdout.split(_END)
        errors = [e for e in done.stderr.splitlines() if "rror" in e and "Invalid job id" not in e]
        is_cut = (bool(lines) and rest[:1] != "\n") or _NEXT in rest or rest.strip().isdigit()
        if errors or is_cut or (done.returncode and "Invalid job id" not in done.stderr):
            why = on_one_line("\n".join(errors) or done.stderr) or "its output is cut"
            raise SlurmSilent(f"Slurm does not answer: 'squeue' failed: {why}")
        yield from (_queued_job(line.split(_NEXT)) for line in lines)

    def _squeue(self, option: str, value: str) -> CompletedProcess[str]:
        every = ("squeue", "-h", "-r", "-a", "-t", "all", option, value, "-o", _FORMAT)
        return slurm_client(*every, cluster=self.cluster)


def _queued_job(fields: list[str]) -> QueuedJob:
    try:
        job, array, index, user, submitted, state, reason, name, comment = fields
        job = job.split("\n")[-1]  # other lines are from a site's wrapper, or name the cluster (-M)
        at = time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S"))
        element = None if index == "N/A" else int(index)
        number = int(job if element is None else array)
        return QueuedJob(number, element, int(user), name, at, state, reason, comment)
    except ValueError:
        raise SlurmSilent(f"Slurm does not answer: 'squeue' printed {fields!r}") from None
