"""The fork servers of a worker: one for the present code, and one for each other checkout."""

from __future__ import annotations

import os
import sys

from jobs.printing import say
from jobs.results.manifest import Job, Manifest
from jobs.worker.environment import with_project
from jobs.worker.isolation import ForkServer, ServerDied


class ForkServers:
    """Starts the fork servers for the runs of a job on this node.

    All servers import the same modules, so that runs start equally fast with each checkout.
    """

    def __init__(self, manifest: Manifest, job: Job, gpus: list[str]):
        self._manifest, self.gpus = manifest, gpus
        names = dict.fromkeys(manifest.runs[run].benchmark for run, _ in job.tasks)
        self._modules = ["jobs.worker.run_process"]
        self._benchmarks = [n if "." in n else f"systems.benchmarks.{n}" for n in names]
        if job.shape.nproc_per_node is not None:  # ranks do not share the imports of the server
            self._modules, self._benchmarks = ["torch", "jobs.worker.torchrun"], []
        elif job.shape.gpus_per_node > 0:  # each run checks its GPUs with torch
            self._modules = ["torch", *self._modules]
        self._servers: dict[str, ForkServer] = {}

    def get(self, checkout: str = "") -> ForkServer:
        """Return the server for a checkout of the code. It is started if it is not alive."""
        server = self._servers.get(checkout)
        if server is None or not server.alive:
            server = self._servers[checkout] = self._start(checkout)
        return server

    def _start(self, checkout: str) -> ForkServer:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        environment, cwd = with_project(dict(os.environ)), None
        if checkout:
            place = self._manifest.checkouts[checkout]
            environment, cwd = with_project(environment, place.python_path), place.cwd
        try:
            return ForkServer(environment, cwd, self._modules, self._benchmarks)
        except ServerDied as error:  # a run imports what it needs, if nothing is preloaded
            slowly = "continuing without preloaded modules, so runs start more slowly"
            say(f"{error}; {slowly}", sys.stdout)
            return ForkServer(environment, cwd)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
