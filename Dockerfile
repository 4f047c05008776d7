# Image of Slipstream for GPUs or for the CPU. It holds no secret, and runs as a user without rights.
#
#   docker build --tag slipstream:gpu .
#   docker build --tag slipstream:cpu --build-arg BUILD=cpu .
#   ... --build-arg VERSION="$(slipstream --version | cut -d' ' -f2)"    what `slipstream --version` says in it
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/workspace" slipstream:gpu slipstream run
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG BUILD=gpu
ARG VERSION=0+unknown
WORKDIR /source
RUN pip install --no-cache-dir uv && python -m venv /opt/slipstream
COPY . .
# PyPI has torch for CUDA alone. Without git, which tells versions by tags, PKG-INFO does.
RUN if [ "$BUILD" = cpu ]; then backend=--torch-backend=cpu; fi \
    && printf 'Metadata-Version: 2.1\nName: slipstream\nVersion: %s\n' "$VERSION" >PKG-INFO \
    && awk 'NR == FNR { pinned[$1]; next } $1 in pinned' "constraints/$BUILD.txt" constraints/hashes.txt >hashes.txt \
    && VIRTUAL_ENV=/opt/slipstream uv pip install --no-cache ${backend:-} --constraints "constraints/$BUILD.txt" \
        --constraints hashes.txt ".[$BUILD,loggers,ray,search,tasks]"

FROM python:${PYTHON}-slim-bookworm
# Kernels of DeepSpeed, Triton and torch.compile are compiled at the first start; KubeRay's probes call wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --user-group --create-home slipstream \
    && install --directory --owner=slipstream --group=slipstream /workspace
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /workspace
CMD ["slipstream", "--help"]
