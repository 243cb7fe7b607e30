"""A real Slurm cluster on the loopback interface for tests: one slurmctld and several slurmds.

    with SlurmCluster(folder) as cluster:
        subprocess.run(["srun", "-N2", "hostname"], env=os.environ | cluster.environment)

`unsupported_reason` tells whether a cluster can be started. The nodes are named 127.0.0.2,
127.0.0.3, ..., which resolve on any machine. Their CPUs, memory and GPUs are fictitious. There is
no accounting, so `sacct` fails. The folder must not be used for anything else, and its path must be
short. The default partition `debug` contains all nodes. The partitions `low` and `high` contain the
last node, on which jobs of `high` preempt those of `low`.

Only root can use the cluster: it has its own munged, whose socket and key only root can reach. Its
daemons listen on loopback only, if `listens_on_loopback`.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobs.launch.signals import noted_signals

T = TypeVar("T")

_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
}
_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
_START_TRIES = 3
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_SOON_S = 240.0  # timeout for what needs only free nodes
_KILL_WAIT_S = 10  # a worker that is told to stop needs time to record, also on a busy machine
# A job step listens on the socket <folder>/spool/<node>/<node>_<job>.<step>. The path of a socket
# has at most 107 bytes.
_LONGEST_FOLDER = 107 - len("/spool/127.0.0.100/127.0.0.100_67043328.4294967291")

_ON_OWN_ADDRESS = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
_SLURM_CONF = """\
ClusterName={cluster.name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
{communication}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its credential has expired, by default 120 s.
AuthInfo=socket={cluster.folder}/munge/socket,cred_expire=5
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
# Without this default a job takes all the memory of its node.
DefMemPerCPU=1500
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
# Without this a request that no node can satisfy stays pending forever.
EnforcePartLimits=ALL
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
JobRequeue=1
MaxArraySize={cluster.max_array_size}
MinJobAge=3600
# Taken from the clock, so that job ids differ from those of an earlier cluster.
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


def unsupported_reason() -> str | None:
    """Return why no cluster can be started on this machine, or None if one can."""
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster"
    missing = [
        package
        for program, package in _PACKAGES.items()
        if shutil.which(program, path=_PATH) is None
    ]
    return f"not installed: {', '.join(missing)} (Debian packages)" if missing else None


class SlurmCluster:
    """A Slurm cluster. `environment` has the variables that Slurm's client commands need."""

    cpus = 4  # of each node
    gpus = ("a100", "h100")  # of each node; of different types, to test requests for a type

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        max_array_size: int = 1001,
        name: str = "probe",  # to tell apart clusters that run at once
    ) -> None:
        self.folder = Path(folder).resolve()
        if len(os.fsencode(self.folder)) > _LONGEST_FOLDER:
            raise ValueError(
                f"the path of the cluster's folder must have at most {_LONGEST_FOLDER} bytes, "
                f"got {str(self.folder)!r}"
            )
        self.nodes = [f"127.0.0.{2 + number}" for number in range(nodes)]
        self.max_array_size, self.name = max_array_size, name
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        """Start the cluster with an empty queue, and return when all nodes are idle.

        Another process may take a port after it was chosen, so a failure is tried again.
        """
        for tries_left in reversed(range(_START_TRIES)):
            try:
                self._start_once()
                break
            except BaseException as error:
                self.stop()
                if not (isinstance(error, RuntimeError) and tries_left):
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancel all jobs and end all processes of the cluster."""
        controller = self._daemons.get("slurmctld")
        if controller and controller.poll() is None and self._controller_answers():
            self.client("scancel", "--user=root")
            active = ("squeue", "-h", "--states=RUNNING,COMPLETING,SUSPENDED,STOPPED")
            deadline = time.monotonic() + _KILL_WAIT_S + _STOP_TIMEOUT_S
            while self.client(*active).stdout and time.monotonic() < deadline:
                time.sleep(0.1)
        self._end(*(name for name in self._daemons if name != "munged"))
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while (pids := self.step_pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._end(*self._daemons)  # munged, without which the others wait for seconds

    def lose_state(self) -> None:
        """Start slurmctld again without its saved state. It gives the ids of jobs again."""
        self._end("slurmctld")
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir(0o700)
        self._spawn("slurmctld")
        self._await(self._controller_answers)

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        """Poll `condition` and return its first true value.

        Raises:
            TimeoutError: after some minutes; the message has the queue and the logs.
        """
        deadline = time.monotonic() + _SOON_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                queue = self.client("squeue", "--states=all")
                report = f"{queue.stdout}{queue.stderr}{self._tails()}"
                raise TimeoutError(f"waited {_SOON_S} s for {what}\n{report}")
            time.sleep(0.2)
        return value

    def client(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm client command, such as squeue, on this cluster."""
        environment = os.environ | self.environment | {"PATH": _PATH}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def _start_once(self) -> None:
        for name in ("dev", "log", "munge", "run", "spool", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(0o700, parents=True)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir()
        self._write_configuration()
        self._start_munged()
        self._spawn("slurmctld", "-c")
        self._await(self._controller_answers)  # if slurmd starts first, it retries after 1 s
        for node in self.nodes:
            self._spawn(f"slurmd-{node}", "-N", node)
        self._await(self._all_idle)

    def _start_munged(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").touch(0o600)
        (munge / "key").write_bytes(os.urandom(128))
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        paths = [f"--{option}={munge / name}" for option, name in files.items()]
        # Without --force munged refuses a socket that not all users can reach.
        self._spawn("munged", "--force", "--origin=127.0.0.1", *paths)
        self._await((munge / "socket").exists)

    def _write_configuration(self) -> None:
        gres = "AutoDetect=off\n"
        for number, kind in enumerate(self.gpus):
            device = self.folder / "dev" / f"gpu{number}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # a copy of /dev/null
            gres += f"Name=gpu Type={kind} File={device}\n"
        (self.folder / "gres.conf").write_text(gres)
        # Slurm reads this file even with proctrack/linuxproc. "disabled" needs version 24.11.
        version = re.findall(r"\d+", self.client("slurmctld", "-V").stdout)
        plugin = "disabled" if [int(part) for part in version] >= [24, 11] else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        host = socket.gethostname().split(".")[0]
        port, *node_ports = _free_ports(1 + len(self.nodes))
        gres_of_node = ",".join(f"gpu:{kind}:1" for kind in self.gpus)
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port}"
            f" CPUs={self.cpus} RealMemory=6000 Gres={gres_of_node}"
            for node, node_port in zip(self.nodes, node_ports, strict=True)
        ]
        text = _SLURM_CONF.format(
            cluster=self,
            host=host,
            communication=_ON_OWN_ADDRESS if listens_on_loopback() else "",
            port=port,
            first_job_id=1 + int(time.time() * 10) % 60_000_000,  # the largest job id is 67,043,328
            kill_wait=_KILL_WAIT_S,
            nodes="\n".join(nodes),
            last=self.nodes[-1],
        )
        (self.folder / "slurm.conf").write_text(text)

    def _spawn(self, name: str, *options: str) -> None:
        """Start a daemon, whose name is munged, slurmctld, or slurmd-127.0.0.2 and so on."""
        program = name.partition("-")[0]
        slurm = ["-D", "-f", self.environment["SLURM_CONF"]]
        foreground = ["--foreground"] if program == "munged" else slurm
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [program, *foreground, *options],
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
            self._daemons[name].kill()  # no effect if it has ended
            self._daemons.pop(name).wait()

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            time.sleep(0.05)  # gives a daemon without its port time to end
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if not dead and condition():
                return
            if dead or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the cluster did not start; daemons that ended: {', '.join(dead) or 'none'}\n"
                    f"{self._tails()}"
                )

    def _controller_answers(self) -> bool:
        return self.client("scontrol", "ping").returncode == 0

    def _all_idle(self) -> bool:
        idle = self.client("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout
        return set(idle.split()) == set(self.nodes)  # each node is listed once per partition

    def step_pids(self) -> list[int]:
        """Return the pids of the cluster's processes that are not children of this process.

        These are job steps and the processes of jobs. All of them have this cluster's SLURM_CONF in
        their environment. Client commands, and perhaps the tests, have it too, but neither a
        program whose name starts with slurm nor the variable SLURMD_NODENAME.
        """
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables and (
                    (process / "exe").readlink().name.startswith("slurm")
                    or any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
                ):
                    pids.append(int(process.name))
        return pids

    def _tails(self) -> str:
        """Return the last lines of each daemon's log, or of its output if it has no log."""
        tails = ""
        for output in sorted((self.folder / "log").glob("*.out")):
            log = output.with_suffix(".log")
            path = log if log.exists() and log.stat().st_size else output
            lines = path.read_text(errors="replace").splitlines()[-15:]
            tails += "\n".join([f"--- {path}", *lines, ""])
        return tails


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:  # hold all of them open, so that they differ
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens_on_loopback() -> bool:
    """Whether a cluster listens on 127.0.0.1 only. Else it listens on all addresses.

    Slurm can be told to listen on one address, but not on which: it takes that of the machine's
    name. With another one, such as 127.0.1.1, a step does not reach its srun, which then hangs.
    """
    try:
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        return False


def main() -> None:
    """Run a cluster in a temporary folder until Ctrl-C: `make cluster`."""
    reason = unsupported_reason()
    if reason:
        raise SystemExit(f"no cluster can be started: {reason}")
    with (
        noted_signals() as noted,  # a second one must not interrupt the end of the daemons
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        SlurmCluster(Path(folder)) as cluster,
    ):
        print(f"a Slurm cluster of {len(cluster.nodes)} nodes is running; use it in another shell:")
        print(f"  export SLURM_CONF={cluster.environment['SLURM_CONF']}")
        print("Ctrl-C stops it and cancels its jobs.", flush=True)
        while not noted:
            time.sleep(0.1)
        print("stopping the cluster; in the other shell, run: unset SLURM_CONF", flush=True)


if __name__ == "__main__":
    main()
