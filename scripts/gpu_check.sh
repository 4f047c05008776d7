#!/usr/bin/env bash
# Runs the tests and benchmarks of this machine's GPUs, each test with a kill timeout (see tests/gpu/check.py): about ten
# minutes on one GPU, and 15 more with vLLM on two or more. Uses .venv, or, if .gpu_bundle/ exists (see
# scripts/gpu_bundle.sh), offline PYTHON (python3) and its wheels. Arguments: those of tests.gpu.check.
#
#   SLIPSTREAM_GPU_TESTS=cpu   run on the CPU at small sizes, to try everything except the device
#   BUNDLE                     folder of the wheels (.gpu_bundle); empty: .venv
#   OUT                        folder of the report (gpu_check/)
set -uo pipefail
cd "$(dirname "$0")/.."
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
# A killed test must not leave a core of many GiB.
ulimit -c 0
"$python" -m tests.gpu.check --out "${OUT:-gpu_check}" "$@"
