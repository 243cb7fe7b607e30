"""A real Slurm cluster on loopback, for test sessions: one slurmctld and some slurmds.

    with SlurmCluster(folder) as cluster:
        subprocess.run(["srun", "-N2", "hostname"], env=os.environ | cluster.environment)

Ask unsupported_reason() first. Nodes are called 127.0.0.2, 127.0.0.3, ... (names that resolve
anywhere); their CPUs, memory and GPUs are made up. There is no accounting, so `sacct` fails.
`folder` is the cluster's own, and its path has to be short. On the last node jobs of the partition
`high` preempt those of `low`; `debug` has all nodes and no part in that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
_START_TRIES = 3
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_KILL_WAIT_S = 10  # a worker that is told to stop has to record first, on a busy machine too
# A step listens on <folder>/spool/<node>/<node>_<job>.<step>; a socket's path has 107 bytes.
_LONGEST_FOLDER = 107 - len("/spool/127.0.0.100/127.0.0.100_67043328.4294967291")

_SLURM_CONF = """\
ClusterName=probe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
# A requeued job waits until its credential has expired: by default 120 s.
AuthInfo=cred_expire=5
StateSaveLocation={cluster.folder}/state
SlurmdSpoolDir={cluster.folder}/spool/%n
SlurmctldPidFile={cluster.folder}/run/slurmctld.pid
SlurmdPidFile={cluster.folder}/run/slurmd-%n.pid
SlurmctldLogFile={cluster.folder}/log/slurmctld.log
SlurmdLogFile={cluster.folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without a default a job takes all the memory of its node.
DefMemPerCPU={memory_per_cpu}
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
# Without it a request that no node can meet stays pending for ever.
EnforcePartLimits=ALL
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
JobRequeue=1
MaxArraySize={cluster.max_array_size}
MinJobAge=3600
# From the clock: what is kept by job id must not meet the ids of an earlier cluster.
FirstJobId={first_job_id}
KillWait={kill_wait}
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=low Nodes={last} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes={last} MaxTime=INFINITE State=UP PriorityTier=2
"""


class _PortTaken(RuntimeError):
    """A daemon could not bind a port that was free a moment ago."""


def unsupported_reason() -> str | None:
    """Why no cluster can be started on this machine, or None if one can."""
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster"
    missing = [
        package
        for program, package in _PACKAGES.items()
        if shutil.which(program, path=_PATH) is None
    ]
    return f"not installed: {', '.join(missing)} (Debian packages)" if missing else None


class SlurmCluster:
    """One cluster; `environment` is what its clients need in their environment."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        cpus: int = 4,
        gpus: int = 2,
        memory_mb: int = 6000,
        max_array_size: int = 1001,
    ) -> None:
        self.folder = Path(folder).resolve()
        if len(os.fsencode(self.folder)) > _LONGEST_FOLDER:
            raise ValueError(f"{self.folder} is longer than {_LONGEST_FOLDER} bytes")
        self.nodes = [f"127.0.0.{2 + number}" for number in range(nodes)]
        self.cpus, self.gpus, self.memory_mb = cpus, gpus, memory_mb
        self.max_array_size = max_array_size
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._controller_port = 0
        self._reservation = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, without jobs, and return when all nodes are idle."""
        if self._daemons:
            raise RuntimeError("the cluster has been started already")
        for tries_left in reversed(range(_START_TRIES)):
            try:
                return self._start_once()
            except BaseException as error:
                self.stop()
                if not (isinstance(error, _PortTaken) and tries_left):
                    raise

    def stop(self) -> None:
        """Cancel all jobs and end all that was started; once stopped, do nothing."""
        self._reservation.close()
        controller = self._daemons.get("slurmctld")
        if controller and controller.poll() is None and self._controller_answers():
            self.client("scancel", "--user=root")
            active = ("squeue", "-h", "--states=RUNNING,COMPLETING,SUSPENDED,STOPPED")
            deadline = time.monotonic() + _KILL_WAIT_S + _STOP_TIMEOUT_S
            while self.client(*active).stdout and time.monotonic() < deadline:
                time.sleep(0.1)
        self._end(*self._daemons)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while (pids := self._left_over()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def stop_controller(self) -> None:
        """End slurmctld alone: jobs run on, and a client fails after about 9 s."""
        self._end("slurmctld")
        # Bound but not listening: connections are refused, yet no outgoing connection on this
        # machine can be given this port, not even that of a slurmd which looks for slurmctld.
        reserved = self._reservation.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", self._controller_port))

    def start_controller(self) -> None:
        """Start slurmctld from the state it saved and return when it answers."""
        self._reservation.close()
        self._spawn("slurmctld")
        self._await(self._controller_answers)

    def wait_for(self, condition: Callable[[], T], timeout_s: float, what: str) -> T:
        """The first true value of condition(), or TimeoutError with the queue and the logs."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                queue = self.client("squeue", "--states=all")
                report = f"{queue.stdout}{queue.stderr}{self._tails()}"
                raise TimeoutError(f"waited {timeout_s} s for {what}\n{report}")
            time.sleep(0.2)
        return value

    def client(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a client of Slurm's, as squeue, against this cluster."""
        environment = os.environ | self.environment | {"PATH": _PATH}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def _start_once(self) -> None:
        for name in ("dev", "log", "run", "spool", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(parents=True)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir()
        self._write_configuration()
        self._spawn("slurmctld", "-c")
        self._await(self._controller_answers)  # a slurmd that comes first tries again after 1 s
        for node in self.nodes:
            self._spawn("slurmd", "-N", node)
        self._await(self._all_idle)

    def _write_configuration(self) -> None:
        gres = "AutoDetect=off\n"
        for number in range(self.gpus):
            device = self.folder / "dev" / f"gpu{number}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # another /dev/null
            gres += f"Name=gpu File={device}\n"
        (self.folder / "gres.conf").write_text(gres)
        # This file is read even with proctrack/linuxproc. Not every version knows "disabled".
        version = re.findall(r"\d+", self.client("slurmctld", "-V").stdout)
        plugin = "disabled" if [int(part) for part in version] >= [24, 11] else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        host = socket.gethostname().split(".")[0]
        self._controller_port, *node_ports = _free_ports(1 + len(self.nodes))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus}"
            f" RealMemory={self.memory_mb}" + (f" Gres=gpu:{self.gpus}" if self.gpus else "")
            for node, port in zip(self.nodes, node_ports, strict=True)
        ]
        text = _SLURM_CONF.format(
            cluster=self,
            host=host,
            port=self._controller_port,
            memory_per_cpu=min(1000, self.memory_mb // self.cpus),
            first_job_id=1 + int(time.time() * 10) % 60_000_000,  # the last one is 67,043,328
            kill_wait=_KILL_WAIT_S,
            nodes="\n".join(nodes),
            last=self.nodes[-1],
        )
        (self.folder / "slurm.conf").write_text(text)

    def _spawn(self, program: str, *options: str) -> None:
        name = "-".join([program, *options[1:]])  # slurmctld, slurmd-127.0.0.2, ...
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [program, "-D", "-f", self.environment["SLURM_CONF"], *options],
                cwd=self.folder,
                env=os.environ | self.environment | {"PATH": _PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end(self, *names: str) -> None:
        for name in names:
            self._daemons[name].terminate()
        for name in names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemons[name].wait(_STOP_TIMEOUT_S)
            self._daemons[name].kill()  # does nothing to one that has ended
            self._daemons.pop(name).wait()

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            time.sleep(0.05)  # first of all: a daemon without its port has ended by then
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if not dead and condition():
                return
            if dead or time.monotonic() > deadline:
                tails = self._tails()
                error = _PortTaken if dead and "Address already in use" in tails else RuntimeError
                raise error(f"no cluster; ended early: {', '.join(dead) or 'none'}\n{tails}")

    def _controller_answers(self) -> bool:
        return self.client("scontrol", "ping").returncode == 0

    def _all_idle(self) -> bool:
        idle = self.client("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout
        return set(idle.split()) == set(self.nodes)  # each is listed once a partition

    def _left_over(self) -> list[int]:
        """The cluster's processes that are no children of this one: steps, and jobs' processes.

        All of them carry our SLURM_CONF. So do clients and perhaps the tests' own processes, but
        those have neither a program named slurm... nor the SLURMD_NODENAME of a job.
        """
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables and (
                    (process / "exe").readlink().name.startswith("slurm")
                    or any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
                ):
                    pids.append(int(process.name))
        return pids

    def _tails(self) -> str:
        """The end of each daemon's log, or of its output if it ended before it had a log."""
        tails = ""
        for output in sorted((self.folder / "log").glob("*.out")):
            log = output.with_suffix(".log")
            path = log if log.exists() and log.stat().st_size else output
            lines = path.read_text(errors="replace").splitlines()[-15:]
            tails += "\n".join([f"--- {path}", *lines, ""])
        return tails


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
