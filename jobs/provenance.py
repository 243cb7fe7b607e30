"""Where a number comes from: git, packages, host, processor, GPUs and their state.

Nothing here imports torch or touches CUDA: GPUs are asked through NVML, where it answers.
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

MAX_UNTRACKED_BYTES = 200_000  # of a file that is saved with the diff: source, not data
# The project is one of them: where it is installed from a wheel, its version tells the code.
PACKAGES = ("cluster-sweeps", "torch", "triton", "numpy", "submitit")


def git_state(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The commit of the tree at `folder`, and its diff against it if the tree is dirty.

    Returns:
        ({"commit", "dirty", "untracked"}, diff): all None where there is no repository, or one that
        does not hold this project: it is around the environment that the project is installed in.
        Where $GIT_COMMIT is set it is the commit, and git is not asked: the tree was copied without
        its .git, perhaps into some other repository.
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
    # Results are no source: a run must not make the tree of the next one dirty.
    paths = ["--", ".", ":!logs"]
    diff = git("diff", "HEAD", "--binary", *paths) or ""
    untracked = (git("ls-files", "--others", "--exclude-standard", *paths) or "").splitlines()
    state = {"commit": head.strip(), "dirty": bool(diff or untracked), "untracked": untracked[:100]}
    for name in untracked:  # a new benchmark that is not committed is what was measured, too
        if (folder / name).is_file() and (folder / name).stat().st_size <= MAX_UNTRACKED_BYTES:
            diff += git("diff", "--no-index", "--binary", "--", os.devnull, name, fine=1) or ""
    return state, diff or None


def save_diff(folder: Path, diff: str) -> str:
    """Save a diff once, under its hash, and return the hash."""
    digest = hashlib.sha256(diff.encode()).hexdigest()[:16]
    path = folder / "diffs" / f"{digest}.diff"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}")
        temporary.write_text(diff, encoding="utf-8")
        temporary.replace(path)
    return digest


def packages() -> dict[str, str | None]:
    """Versions of what matters to a measurement, read from metadata, not by importing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def processor() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_device() -> str:
    """The kind of device that a run without a GPU measures."""
    return f"cpu: {processor()}"


@cache
def _nvml() -> Any:
    """pynvml, initialised, or None where there is no driver or no package."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: then nothing is known of the GPUs
        return None
    return pynvml


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here: the caller's own tokens, else 0 to n-1."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        tokens = [token.strip() for token in given.split(",")]
        # CUDA stops reading at the first token that names nothing.
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
    try:  # the package is an extra; the tool comes with the driver
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) * (
        done.returncode == 0
    )


def gpu_states(tokens: list[str]) -> list[dict[str, Any]]:
    """Name, UUID, and what NVML answers of clock, power, temperature and throttling, by GPU."""
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
    """The kind of device that a job with these GPUs measures: a GPU's name, or the processor's."""
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
