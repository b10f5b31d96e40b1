# The service, for a CPU or a CUDA GPU.
#
#   docker build -t kv-translator .                                    CPU
#   docker build -t kv-translator:cuda --build-arg TORCH_INDEX= .      CUDA, from PyPI's torch
#
# torch brings its own CUDA libraries, so both use the same base; a GPU host needs only its
# driver and the NVIDIA container toolkit. The image runs as user 10001, writes nothing but
# /tmp, and so works with a read-only root file system.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/deploy/constraints.txt
WORKDIR /src
COPY deploy/constraints.txt deploy/
# torch in a layer of its own: gigabytes that a change of the code leaves alone.
RUN python -m venv /opt/kvt \
    && /opt/kvt/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY mappers mappers
COPY service service
RUN /opt/kvt/bin/pip install .

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/kvt /opt/kvt
COPY LICENSE NOTICE /usr/share/doc/kv-translator/
ENV PATH=/opt/kvt/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    KVT_HOST=0.0.0.0 \
    KVT_PORT=8080 \
    KVT_METRICS_PORT=9090
# Where volumes go for the socket of KVT_BUFFERS, which others pass through to, and for KVT_STATE: a
# new one takes over owner and mode.
RUN install -d -o 10001 -g 10001 -m 711 /run/kvt \
    && install -d -o 10001 -g 10001 -m 700 /state
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['KVT_PORT'] + '/readyz', timeout=2)"]
ENTRYPOINT ["kvt"]
CMD ["serve"]
