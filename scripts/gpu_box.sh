#!/usr/bin/env bash
# On a bare machine with NVIDIA GPUs: install, run the CPU tests on its torch, the GPU tests, then
# sweeps through the local queue; everything worth keeping goes to one folder.
#
#   scripts/gpu_box.sh OUT [SWEEP ...]        for example: scripts/gpu_box.sh out sweeps/flash.yaml
#
# Results go to logs/$RESULTS/<sweep>, are resumed from there, and come back with every log and table
# in one archive, OUT/results.tar.gz: the records as logs/$RESULTS, the rest as box/.
#   RESULTS=h200         folder under logs/ (default: h200)
#   WHEELS=DIR           install from the wheels in DIR, without a network, beside the torch that is
#                        here; otherwise pip installs the project into a virtual environment
#   TESTS=all            all, gpu or none
#   BUDGET_S=N           stop the sweeps after N seconds; the next call goes on from there
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_box.sh OUT [SWEEP ...]}
shift
mkdir -p "$out"
out=$(realpath "$out")
box=$(mktemp -d)/box
mkdir "$box"
results=logs/${RESULTS:-h200}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
# Where packages came without bytecode and cannot get any, each run would compile what it imports late.
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$(mktemp -d)}
unset PYTHONDONTWRITEBYTECODE
failed=0

step() { printf '\n== %s (%(%H:%M:%S)T)\n' "$1" -1; }

step install
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
else
    "$python" -m venv .venv && .venv/bin/pip install -q -e '.[test,nvml]' || exit 1
    python=$PWD/.venv/bin/python
fi
{
    nvidia-smi
    "$python" -c 'import torch, triton, sys; print(sys.version, torch.__version__, torch.version.cuda, triton.__version__)'
} | tee "$box/machine.txt"

if [ "${TESTS:-all}" = all ]; then
    step 'CPU tests'
    "$python" -m pytest -q -m 'not gpu and not slurm and not slow and not exhaustive' -p no:cacheprovider >"$box/cpu-tests.log" 2>&1 || failed=1
    tail -n 15 "$box/cpu-tests.log"
    TRITON_INTERPRET=1 "$python" -m pytest -q tests/interpreted -p no:cacheprovider \
        >"$box/interpreted-tests.log" 2>&1 || failed=1
    tail -n 5 "$box/interpreted-tests.log"
fi
if [ "${TESTS:-all}" != none ]; then
    step 'GPU tests'
    "$python" -m pytest -q -m 'gpu and not exhaustive' -p no:cacheprovider >"$box/gpu-tests.log" 2>&1 || failed=1
    tail -n 25 "$box/gpu-tests.log"
fi

deadline=$((SECONDS + ${BUDGET_S:-1000000}))
for sweep in "$@"; do
    step "$sweep"
    left=$((deadline - SECONDS))
    if [ "$left" -lt 10 ]; then
        echo "no time left: not run"
        failed=1
        continue
    fi
    name=$(basename "$sweep" .yaml)
    # SIGINT lets the queue record what it was doing, so that the next call resumes.
    timeout --signal=INT --kill-after=60 "$left" \
        "$python" -m jobs.submit "$sweep" --local --out "$results/$name" >"$box/$name.log" 2>&1 || failed=1
    tail -n 6 "$box/$name.log"
    "$python" aggregate.py "$results/$name" >"$box/$name.md" 2>>"$box/$name.log" || failed=1
done
mkdir -p "$results"
tar -czf "$out/results.tar.gz" "$results" -C "$(dirname "$box")" box
step "done, exit $failed"
exit "$failed"
