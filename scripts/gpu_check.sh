#!/usr/bin/env bash
# Tests and figures of this machine's GPU, within ten minutes: with .venv, or, where scripts/gpu_bundle.sh was carried
# here, with PYTHON (python3) and the wheels of .gpu_bundle/, without a network.
#
#   SLIPSTREAM_GPU_TESTS=cpu   tries all but the device, at small sizes
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
    # Beside what this Python has, so that its PyTorch is used; a virtual environment of a virtual environment would not
    # see it.
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
