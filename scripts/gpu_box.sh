#!/usr/bin/env bash
# Install the project on a new machine with NVIDIA GPUs. Then run the CPU tests, the GPU tests and
# sweeps on this machine, and pack all results into one archive.
#
#   scripts/gpu_box.sh OUT [SWEEP[:SECONDS] ...]     for example: scripts/gpu_box.sh out sweeps/flash.yaml:300
#
# A sweep ends after its SECONDS, if given, so that the others have their share of a machine's time.
# Results are written to logs/$RESULTS/<sweep>. If this folder already has results, the sweep is
# resumed. The archive OUT/results.tar.gz contains the folder logs/$RESULTS, the folder logs/diffs with
# the uncommitted changes that were measured, and the folder box/ with the tables of the sweeps and the
# logs of the tests and sweeps. At the end, the script prints what is left of each sweep. It exits with 1
# if a test or a sweep failed or is not complete.
#
# A copy of the checkout without .git needs the file .code_state.json, which `python -m jobs carry` writes
# in the checkout. Otherwise records have no commit.
#
# Environment variables:
#   RESULTS=NAME         folder under logs/ (default: h200)
#   WHEELS=DIR           install the wheels in DIR without a network; torch must already be installed.
#                        Default: pip installs the project into the virtual environment .venv
#   TESTS=all|gpu|none   tests to run (default: all)
#   BUDGET_S=N           stop the sweeps after N seconds; the next call resumes them (default: no limit)
#   PYTHON=PATH          Python interpreter (default: python3)
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
# Write bytecode to a writable folder. Packages may be in a folder that is not writable and has no
# bytecode. Each run would then compile every module that it imports.
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$(mktemp -d)}
unset PYTHONDONTWRITEBYTECODE
failed=0

step() { printf '\n== %s (%(%H:%M:%S)T)\n' "$1" -1; }

step install
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
    # Python reads .pth files, as of nvidia-cutlass-dsl, only in site folders.
    echo 'import os, site; site.addsitedir(os.path.dirname(__file__))' >"$site/sitecustomize.py"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
else
    "$python" -m venv .venv && .venv/bin/pip install -q -e '.[test]' || exit 1
    python=$PWD/.venv/bin/python
fi
{
    nvidia-smi
    "$python" -c 'import torch, triton, sys; print(sys.version, torch.__version__, torch.version.cuda, triton.__version__)'
    "$python" -m pip check # tells which package a wheel lacks
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

for given in "$@"; do
    case $given in
    *:*[!0-9]* | *:) echo "SWEEP:SECONDS: $given has no whole number of seconds" >&2; exit 2 ;;
    esac
done
deadline=$((SECONDS + ${BUDGET_S:-1000000}))
for given in "$@"; do
    sweep=${given%:*}
    step "$sweep"
    left=$((deadline - SECONDS))
    if [ "$left" -lt 10 ]; then
        echo "not run: BUDGET_S is used up"
        failed=1
        continue
    fi
    if [ "$sweep" != "$given" ] && [ "${given##*:}" -lt "$left" ]; then left=${given##*:}; fi
    name=$(basename "$sweep" .yaml)
    # SIGINT lets the queue record the interrupted runs, so that the next call resumes them.
    timeout --signal=INT --kill-after=60 "$left" \
        "$python" -m jobs.submit "$sweep" --local --out "$results/$name" >"$box/$name.log" 2>&1 || failed=1
    tail -n 6 "$box/$name.log"
    "$python" aggregate.py "$results/$name" >"$box/$name.md" 2>>"$box/$name.log" || failed=1
done
step left
for given in "$@"; do
    sweep=${given%:*}
    echo "$sweep"
    plan=$("$python" -m jobs.submit "$sweep" --local --dry-run --out "$results/$(basename "$sweep" .yaml)" 2>&1)
    (grep -E '^(to run|expected|paired) ' <<<"$plan" || echo "$plan") | sed 's/^/  /'
done | tee "$box/left.txt"
mkdir -p "$results" logs/diffs
# The name of a diff is a hash of its content. All sweeps have the same one, so one copy is kept.
find "$results" -path '*/diffs/*.diff' -exec mv -t logs/diffs {} ';'
tar -czf "$out/results.tar.gz" "$results" logs/diffs -C "$(dirname "$box")" box
step "done, exit $failed"
exit "$failed"
