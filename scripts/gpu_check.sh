#!/usr/bin/env bash
# Runs the tests and benchmarks of this machine's GPU within ten minutes: with .venv, or, if .gpu_bundle/ exists (see
# scripts/gpu_bundle.sh), offline with PYTHON (python3) and its wheels.
#
#   SLIPSTREAM_GPU_TESTS=cpu   run on the CPU at small sizes, to try everything except the device
#   BUNDLE                     folder of the wheels (.gpu_bundle); empty: .venv
#   OUT                        folder of the report (gpu_check/)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu_check}
bundle=${BUNDLE-.gpu_bundle}
python=${PYTHON:-$([ -d "$bundle" ] && echo python3 || echo .venv/bin/python)}
if [ -d "$bundle" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # A target folder instead of a virtual environment, which could not see PyTorch if this Python is in one itself.
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" \
        "$bundle"/*.whl || exit 1
    export PYTHONPATH=$PWD:$site
else
    export PYTHONPATH=$PWD
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$out"
size=$([ "${SLIPSTREAM_GPU_TESTS:-}" = cpu ] && echo "--tiny --device=cpu")
# shellcheck disable=SC2086
timeout 290 "$python" -m benchmarks.gpu $size --out="$out/figures.json" 2>&1 | tee "$out/figures.txt"
figures=$?
timeout 290 "$python" -m pytest -q -rs -p no:cacheprovider --timeout=200 tests/gpu 2>&1 | tee "$out/tests.txt"
tests=$?
echo "gpu check: figures $([ $figures = 0 ] && echo done || echo FAILED), tests $([ $tests = 0 ] && echo passed || echo FAILED); $out/"
exit $((figures || tests))
