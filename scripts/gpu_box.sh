#!/usr/bin/env bash
# On a bare machine with NVIDIA GPUs: install, run the CPU tests on its torch, the GPU tests, then
# sweeps through the local queue; everything worth keeping goes to one folder.
#
#   scripts/gpu_box.sh OUT [SWEEP ...]        for example: scripts/gpu_box.sh out sweeps/flash.yaml
#
# Results go to logs/$RESULTS/<sweep>, are resumed from there, and come back as OUT/records.tar.gz.
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
results=logs/${RESULTS:-h200}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
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
} | tee "$out/machine.txt"

if [ "${TESTS:-all}" = all ]; then
    step 'CPU tests'
    "$python" -m pytest -q -m 'not gpu and not slurm' -p no:cacheprovider >"$out/cpu-tests.log" 2>&1 || failed=1
    tail -n 15 "$out/cpu-tests.log"
fi
if [ "${TESTS:-all}" != none ]; then
    step 'GPU tests'
    "$python" -m pytest -q -m gpu -p no:cacheprovider >"$out/gpu-tests.log" 2>&1 || failed=1
    tail -n 25 "$out/gpu-tests.log"
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
        "$python" -m jobs.submit "$sweep" --local --out "$results/$name" >"$out/$name.log" 2>&1 || failed=1
    tail -n 6 "$out/$name.log"
    "$python" aggregate.py "$results/$name" >"$out/$name.md" 2>>"$out/$name.log" || failed=1
done
[ -d "$results" ] && tar -czf "$out/records.tar.gz" "$results"
step "done, exit $failed"
exit "$failed"
