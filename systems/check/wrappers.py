"""Check a data-parallel wrapper or a sharded optimizer on several ranks, with a small model.

Each case compares a training with a single process that trains on the batches of all ranks, see
`systems.check.parallel_training`. The ranks are started by `python -m jobs check`, or by

    torchrun --nproc-per-node 2 -m systems.check.wrappers ddp my_ddp.py:MyDDP gloo RESULTS

Rank 0 writes one line of JSON per case to the file RESULTS.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from systems.check.checked import Checked, one_line
from systems.external.reference import Reference

WORLD_SIZES = (2, 3)
# Parameters of the models, smallest first. The second has an odd number of blocks and a vocabulary
# whose size no number of ranks divides.
MODELS: list[dict[str, Any]] = [
    {"d_model": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11},
    {"d_model": 16, "d_ff": 40, "num_layers": 3, "num_heads": 2, "vocab_size": 101},
]
TIMEOUT_S = 300  # for the start of the ranks and all their cases, in seconds
COLLECTIVE_S = 60.0  # for a collective, in seconds; it fails if a rank does not call it
HANGS = "; does every rank call the same collectives?"
LOOKS = "it looks as if"  # before the mistake that explains an error
BUCKET_SIZE_MB = 100.0  # for a wrapper without a default, as in the benchmarks


@dataclass(frozen=True)
class Case:
    """Parameters of one check."""

    world_size: int
    model: int  # index in MODELS
    precision: str

    def __str__(self) -> str:
        model = MODELS[self.model]
        blocks = "1 block" if model["num_layers"] == 1 else f"{model['num_layers']} blocks"
        sizes = f"{blocks} and d_model {model['d_model']}"
        return f"{self.world_size} ranks, {self.precision}, model with {sizes}"


def cases(kind: str, world_size: int) -> list[Case]:
    """Return the cases for a number of ranks, smallest first."""
    precisions = ("fp32",) if kind == "fsdp" else ("fp32", "bf16")
    return [
        Case(world_size, model, precision)
        for model in range(len(MODELS))
        for precision in precisions
    ]


def check_parallel_code(kind: str, reference: str, backend: str) -> Iterator[Checked]:
    """Start ranks for each number of ranks, and yield the results of all cases.

    If a rank raises an exception, crashes or hangs, the last result of this number of ranks is the
    case that crashed, with the reason, and its further cases are left out. The kind is ddp, fsdp or
    optimizer, and the backend gloo for CPUs or nccl for GPUs.
    """
    for world_size in WORLD_SIZES:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            results.touch()
            ended = _start_ranks([kind, reference, backend, str(results)], world_size)
            found = [_read(line) for line in results.read_text().splitlines()]
        done = [checked for checked in found if not checked.crashed]
        yield from done
        left = cases(kind, world_size)[len(done) :]
        if left:
            raised = [checked.refused for checked in found if checked.crashed]
            # A rank that ended without an exception is the cause of exceptions on other ranks, and
            # else the first exception is that of the others.
            raising = [text.partition(":")[0] for text in raised]
            silent = [f"{who} {how}" for who, how in ended.items() if who not in raising]
            why = next(iter([*silent, *raised]), "the ranks ended without a result")
            yield Checked(left[0], refused=why, crashed=True)


def _start_ranks(arguments: list[str], world_size: int) -> dict[str, str]:
    """Run this module under torchrun. Return which ranks failed first, and how."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = [f"--nproc-per-node={world_size}", "-m", "systems.check.wrappers", *arguments]
    with (
        tempfile.TemporaryFile() as output,  # a pipe may be open in a process of the user's code
        subprocess.Popen(
            [*torchrun, *ranks],
            stdout=subprocess.DEVNULL,
            stderr=output,
            # Then torchrun does not get Ctrl-C, after which it waits 30 s for its ranks.
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"the ranks": f"did not finish in {TIMEOUT_S} s{HANGS}"}
        finally:
            process.terminate()  # torchrun then stops its ranks
        output.seek(0)
        told = output.read().decode(errors="replace")
    # Not SIGTERM, by which torchrun ends the other ranks
    codes = re.findall(r"rank +: (\d+).*\s+exitcode +: (-?(?!15\b)\d+)", told)
    return {f"rank {rank}": f"ended with exit code {code}" for rank, code in codes}


def _read(line: str) -> Checked:
    data = json.loads(line)
    return Checked(**(data | {"case": Case(**data["case"])}))


def _run_rank(kind: str, reference: str, backend: str, results: Path) -> None:
    import torch.distributed as dist

    from systems.process_group import process_group

    def write(checked: Checked) -> None:
        with results.open("a") as file:
            file.write(json.dumps(asdict(checked)) + "\n")

    file = Reference.parse(reference).find().resolve()
    with process_group(backend, COLLECTIVE_S) as device:
        rank = dist.get_rank()
        for case in cases(kind, int(os.environ["WORLD_SIZE"])):
            try:
                checked = _check(kind, reference, backend, case, device)
            except (Exception, SystemExit) as error:
                hangs = HANGS if "Timed out" in str(error) else ""
                why = f"rank {rank}: {one_line(error)}{_line_of(error, file)}{hangs}"
                write(Checked(case, refused=why, crashed=True))
                raise
            if rank == 0:
                write(checked)


def _line_of(error: BaseException, file: Path) -> str:
    """Return the last line in the file of the user's code where an exception was, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f" ({file.name}:{lines[-1]})" if lines else ""


def _check(kind: str, reference: str, backend: str, case: Case, device: Any) -> Checked:
    """Run one case on this rank. All ranks get the same status, except if a rank alone fails."""
    from systems.benchmark import Unsupported, WrongOutput

    try:
        errors = _errors(kind, reference, backend, case, device)
    except (Unsupported, NotImplementedError) as error:
        return Checked(case, refused=str(error) or type(error).__name__)
    except WrongOutput as error:
        return Checked(case, wrong=[str(error), *_explain(kind, str(error), case.world_size)])
    if kind == "ddp":
        try:
            _errors(kind, reference, backend, case, device, differs=True)
        except WrongOutput as error:
            why = "the weights of rank 0 are not copied to the other ranks at the start"
            return Checked(case, errors, [str(error), f"{LOOKS} {why}"])
    return Checked(case, errors)


def _errors(
    kind: str, reference: str, backend: str, case: Case, device: Any, differs: bool = False
) -> dict[str, float]:
    """Return the errors of a few steps against a single process, and check another step.

    With differs, the model has other weights on each rank before it is wrapped.
    """
    import torch.distributed as dist

    from systems.check.late_gradients import watch_gradients
    from systems.check.parallel_training import (
        LOCAL,
        check_again,
        check_optimizer_again,
        check_parallel,
    )
    from systems.check.sharded_training import gathered
    from systems.parallel import BucketedDDP
    from systems.training.external_wrappers import make_sharded_optimizer, wrap_ddp, wrap_fsdp
    from systems.training.parallel_params import ParallelParams
    from systems.training.parallel_training import ParallelTraining
    from systems.training.training import optimizer_class_and_options

    sizes = {"size": "small", "context_length": 6, "batch_size": 2, **MODELS[case.model]}
    ranks = {"world_size": case.world_size, "backend": backend, "precision": case.precision}
    params = ParallelParams.model_validate(sizes | ranks)

    def wrap(inner: Any) -> Any:
        if kind == "optimizer":
            return BucketedDDP(inner, BUCKET_SIZE_MB)
        if kind == "fsdp":
            return wrap_fsdp(reference, inner, None)
        for parameter in inner.parameters() if differs else ():
            parameter.data += dist.get_rank()
        return wrap_ddp(reference, inner, None, BUCKET_SIZE_MB)

    def make_optimizer(parameters: Any) -> Any:
        return make_sharded_optimizer(reference, parameters, *optimizer_class_and_options(params))

    alone = ParallelTraining(params, device, dist.get_rank())
    own = make_optimizer if kind == "optimizer" else None
    training = ParallelTraining(params, device, dist.get_rank(), wrap, own, kind != "fsdp")
    watch_gradients(training)
    whole = gathered(training, alone) if kind == "fsdp" else LOCAL
    errors = check_parallel(training, alone, whole)
    check_again(training, alone, whole)
    if kind == "optimizer":
        check_optimizer_again(training)
    return errors


def _explain(kind: str, message: str, world_size: int) -> list[str]:
    """Return which mistake explains the error in a message, in one line, or no line."""
    from systems.check.late_gradients import CHANGED

    found = None if kind == "optimizer" else re.search(r"gradient ([\d.e+-]+)", message)
    error = float(found[1]) if found else math.nan
    causes = {
        "the wrapper does not wait for all of its communication": message.startswith(CHANGED),
        "ranks do not get the updates of other ranks": kind == "optimizer" and "differ" in message,
        "gradients are summed over the ranks, but not divided by the number of ranks": (
            abs(error - (world_size - 1)) < 0.02
        ),
        "gradients are divided by the number of ranks twice, or divided without a sum": (
            abs(error - (1 - 1 / world_size)) < 0.02
        ),
        "gradients are not exchanged between the ranks": found and "differ from rank 0" in message,
    }
    return [f"{LOOKS} {cause}" for cause, is_so in causes.items() if is_so][:1]


if __name__ == "__main__":
    _run_rank(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
