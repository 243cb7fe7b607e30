"""Provenance of a measurement: git commit, package versions, CPU, and the state of the GPUs.

This module neither imports torch nor initializes CUDA. It queries GPUs through NVML. Without NVML,
it asks nvidia-smi for the number and the name of the GPUs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

MAX_UNTRACKED_BYTES = 200_000  # larger untracked files, probably data, are not in the diff
# Includes this project, because in a wheel installation only its version identifies the code.
PACKAGES = ("cluster-sweeps", "torch", "triton", "numpy", "submitit")


def git_state(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return the git commit and the uncommitted changes of a working tree.

    If the environment variable GIT_COMMIT is set, its value is returned as the commit, and git is
    not called. This is for a copy of the project without its .git folder.

    Args:
        folder: root of the working tree. Changes in its logs/ folder are ignored.

    Returns:
        A pair (state, diff). `state` has the keys "commit" (the hash), "dirty" (whether there are
        uncommitted changes) and "untracked" (names of at most 100 untracked files). All values are
        None if `folder` is not in a git repository, or if the repository does not track this
        project, for example because the project is installed in a virtual environment. `diff` is
        the binary diff against the commit, including small untracked files. It is None if there
        are no changes.
    """
    if os.environ.get("GIT_COMMIT"):
        return {"commit": os.environ["GIT_COMMIT"], "dirty": None, "untracked": None}, None

    def git(*arguments: str, fine: int = 0) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, errors="replace"
            )
        except OSError:
            return None
        return done.stdout if done.returncode in (0, fine) else None

    head = git("rev-parse", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", "jobs/__init__.py") is None:
        return {"commit": None, "dirty": None, "untracked": None}, None
    # Ignore results: the records of one sweep must not make the tree dirty for the next sweep.
    paths = ["--", ".", ":!logs"]
    diff = git("diff", "HEAD", "--binary", *paths) or ""
    untracked = (git("ls-files", "--others", "--exclude-standard", *paths) or "").splitlines()
    state = {"commit": head.strip(), "dirty": bool(diff or untracked), "untracked": untracked[:100]}
    for name in untracked:  # the measured benchmark may be a file that is not committed yet
        if (folder / name).is_file() and (folder / name).stat().st_size <= MAX_UNTRACKED_BYTES:
            diff += git("diff", "--no-index", "--binary", "--", os.devnull, name, fine=1) or ""
    return state, diff or None


def save_diff(folder: Path, diff: str) -> str:
    """Save a diff as `folder`/diffs/<hash>.diff and return the hash. An existing file is kept."""
    digest = hashlib.sha256(diff.encode()).hexdigest()[:16]
    path = folder / "diffs" / f"{digest}.diff"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}")
        temporary.write_text(diff, encoding="utf-8")
        temporary.replace(path)
    return digest


def packages() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect a measurement.

    The versions are read from package metadata, without importing the packages. None means that
    the package is not installed.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def processor() -> str:
    """Return the model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_device() -> str:
    """Return the `device` field for records of CPU runs, for example "cpu: AMD EPYC 9654"."""
    return f"cpu: {processor()}"


@cache
def _nvml() -> Any:
    """Return the initialized pynvml module, or None if the package or the driver is missing."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # no package, no driver or no permission
        return None
    return pynvml


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that this process may use.

    If CUDA_VISIBLE_DEVICES is set, these are its entries up to the first invalid entry, as in CUDA.
    Otherwise these are the indices of all GPUs of the host.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        tokens = [token.strip() for token in given.split(",")]
        # CUDA ignores everything from the first invalid entry on.
        kept: list[str] = []
        for token in tokens:
            if not token or (token.isdigit() and int(token) >= _gpu_count()) or token[0] == "-":
                break
            kept.append(token)
        return kept if _gpu_count() else []
    return [str(i) for i in range(_gpu_count())]


@cache
def _gpu_count() -> int:
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetCount())
    try:  # the NVML package is optional, but nvidia-smi comes with the driver
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) * (
        done.returncode == 0
    )


def gpu_states(tokens: list[str]) -> list[dict[str, Any]]:
    """Return name, UUID, SM clock, power, temperature and throttle reasons of each GPU.

    Args:
        tokens: GPU indices or UUIDs, as in CUDA_VISIBLE_DEVICES.

    Returns:
        One dictionary per GPU. A value is None if NVML cannot report it. GPUs that NVML does not
        find are left out. The list is empty if NVML is not available.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    states = []
    for token in tokens:
        try:
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(token))
                if token.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(token)
            )
        except nvml.NVMLError:
            continue
        questions = {
            "name": lambda h: nvml.nvmlDeviceGetName(h),
            "uuid": lambda h: nvml.nvmlDeviceGetUUID(h),
            "sm_clock_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
            "power_w": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
            "temperature_c": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda h: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),
        }
        state: dict[str, Any] = {}
        for name, ask in questions.items():
            try:
                state[name] = ask(handle)
            except (nvml.NVMLError, AttributeError):
                state[name] = None
        states.append(state)
    return states


def driver_version() -> str | None:
    nvml = _nvml()
    try:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else None
    except nvml.NVMLError:
        return None


def device_kind(tokens: list[str]) -> str:
    """Return the name of the first given GPU, for the field `device` of records.

    Args:
        tokens: GPU indices or UUIDs, as in CUDA_VISIBLE_DEVICES. Empty for a run on the CPU.

    Returns:
        The name of the first GPU, or "GPU" if the name is unknown. If `tokens` is empty, the text
        "cpu: " and the name of the CPU.
    """
    if not tokens:
        return cpu_device()
    states = gpu_states(tokens[:1])
    if states and states[0]["name"]:
        return str(states[0]["name"])
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", tokens[0]],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout.strip() or "GPU"
    except (OSError, subprocess.TimeoutExpired):
        return "GPU"
