# The images of Ryzanstein: one file, a target per service.
#
#   docker build --target gateway .     gateway | scheduler | health-monitor | executor | executor-gpu | cli | nats
#   docker build --target executor-vllm --build-arg BASE_IMAGE=vllm/vllm-openai:...@sha256:... .
#
#                requirements ──▶ *-packages ──┐
#   build ───────────────────────▶ package ────┼──▶ gateway, scheduler, health-monitor, executor, cli
#   runtime (no compiler, no root) ────────────┘                               │             └──▶ nats
#                                                                              └──▶ executor-gpu (a compiler)
#   executor-vllm: of `runtime` and `package` too, with the executor's packages but for PyTorch's.
#
# An image has two layers of ours: the packages it depends on, the same until a version changes, and the project.
# Nothing is fetched at run time but models, by `ryzanstein models pull` into the volume /models. What an image
# writes lies in /tmp and in its volumes, so the root file system can be read-only.
#
# BASE_IMAGE  any Debian or Ubuntu with Python 3.11 or newer, its venv module and its headers (Debian: python3-venv,
#             python3-dev).
#             One that has gcc needs no package of Debian's. For executor-vllm: vLLM's own image (VLLM_IMAGE of
#             compose/.env names one).
# NATS_IMAGE  any image with the program nats-server, and wget for its health check.
# TORCH_INDEX package index that torch alone comes from: that of PyTorch's CPU wheels makes the executor a
#             tenth of the size. Empty: the one that pip is set to use, whose torch brings CUDA and NCCL for GPUs.
# VERIFY      empty: packages are held to constraints.txt by version alone, not by hash, as a torch of any other index
#             needs it.
#
# Version and revision are labels that whoever builds gives (`make images`, compose/): here they would make every
# layer after them anew.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
ARG NATS_IMAGE=nats:2.15.1-alpine

# --- what is installed ---------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS build
SHELL ["/bin/sh", "-eu", "-c"]
# For the executor's kernels. Which gcc compiles them is the base's choice, as everything else of Debian's.
# hadolint ignore=DL3008
RUN command -v gcc > /dev/null || { \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    }
WORKDIR /src
# Two environments: what builds, and what is shipped, which has no pip but where a service needs it.
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt ./
ARG VERIFY=1
RUN --mount=type=cache,target=/root/.cache/pip python3 -m venv /opt/build \
    && sed -n '/^pip==/,/[^\\]$/p' constraints.txt > pip.txt && pip install --require-hashes --requirement pip.txt \
    && { test -n "${VERIFY}" || sed -i 's/ \\$//; /^ *--/d' constraints.txt; } \
    && pip install --constraint constraints.txt mypy setuptools \
    && python3 -m venv --without-pip /opt/venv

# Each extra of pyproject.toml as a file of its own: what is installed from it stays in the cache until it changes.
# Every service sends traces where OTEL_EXPORTER_OTLP_ENDPOINT is set, so what sends them is in the core.
FROM build AS requirements
COPY pyproject.toml ./
RUN mkdir extras && python3 -c "import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
extras = project['optional-dependencies']; extras['core'] = project['dependencies'] + extras['tracing']; \
[pathlib.Path('extras', name).write_text('\n'.join(lines)) for name, lines in extras.items()]"

FROM build AS core-packages
ENV PIP_PYTHON=/opt/venv/bin/python3
COPY --from=requirements /src/extras/core /extras/
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt --requirement /extras/core \
    && /opt/venv/bin/python3 -c "import pathlib, sysconfig; \
pathlib.Path(sysconfig.get_path('purelib'), 'ryzanstein.pth').write_text('/opt/ryzanstein\n')"

FROM core-packages AS gateway-packages
COPY --from=requirements /src/extras/gateway /extras/
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt --requirement /extras/gateway

FROM core-packages AS scheduler-packages
COPY --from=requirements /src/extras/scheduler /extras/
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt --requirement /extras/scheduler

FROM core-packages AS health-monitor-packages
COPY --from=requirements /src/extras/health-monitor /extras/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt --requirement /extras/health-monitor

FROM core-packages AS cli-packages
COPY --from=requirements /src/extras/cli /extras/
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt --requirement /extras/cli

# The executor's image fetches and converts its model as well, before it computes: that takes torch and the
# command line. torch goes first, alone from its index; what it depends on comes with the rest.
FROM cli-packages AS executor-packages
ARG TORCH_INDEX=
COPY --from=requirements /src/extras/executor /extras/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt ${TORCH_INDEX:+--no-deps --index-url "${TORCH_INDEX}"} torch \
    && pip install --constraint constraints.txt --requirement /extras/executor

# An executor whose engine is vLLM computes nothing itself, and imports none of these. Without them no model is
# converted; `ryzanstein models pull` fetches those that have safetensors, whatever their architecture.
FROM cli-packages AS executor-vllm-packages
COPY --from=requirements /src/extras/executor /extras/
RUN --mount=type=cache,target=/root/.cache/pip sed -i -E '/^(accelerate|torch|transformers)/d' /extras/executor \
    && pip install --constraint constraints.txt --requirement /extras/executor

# The project itself, with its kernels and compiled modules: an image without them would compute, at a fraction of the
# speed.
FROM build AS package
COPY pyproject.toml setup.py README.md LICENSE ./
COPY shared shared
COPY services services
RUN --mount=type=cache,target=/root/.cache/pip \
    RYZANSTEIN_COMPILE=1 pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && PIP_PYTHON=/opt/venv/bin/python3 pip install --no-deps --target /opt/ryzanstein /wheels/*.whl \
    && ls /opt/ryzanstein/services/executor/native/_kernels*.so

# --- what runs -----------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS runtime
ARG BASE_IMAGE
RUN groupadd --gid 10001 ryzanstein \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin ryzanstein \
    && install -d -o 10001 -g 10001 /models /spill /weights
ENV PATH=/opt/ryzanstein/bin:/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RYZANSTEIN_HOST=0.0.0.0 \
    RYZANSTEIN_LOG_FORMAT=json
LABEL org.opencontainers.image.title="Ryzanstein" \
      org.opencontainers.image.description="Distributed LLM inference on your own machines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
WORKDIR /tmp
USER 10001:10001

# Each becomes the service itself (exec form, and `serve` replaces its process): SIGTERM reaches it.
FROM runtime AS gateway
COPY --from=gateway-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
ENV RYZANSTEIN_PORT=8000 RYZANSTEIN_GRPC_PORT=8001
EXPOSE 8000 8001
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["ryzanstein", "probe", "gateway"]
ENTRYPOINT ["ryzanstein", "serve", "gateway"]

FROM runtime AS scheduler
COPY --from=scheduler-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
ENV RYZANSTEIN_OPS_PORT=8081
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["ryzanstein", "probe", "scheduler"]
ENTRYPOINT ["ryzanstein", "serve", "scheduler"]

FROM runtime AS health-monitor
COPY --from=health-monitor-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
ENV RYZANSTEIN_OPS_PORT=8081
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["ryzanstein", "probe", "health-monitor"]
ENTRYPOINT ["ryzanstein", "serve", "health-monitor"]

# Volumes: /models; /weights for RYZANSTEIN_WEIGHT_CACHE_DIRECTORY where /models is read-only, so that a ring that
# starts again need not pack its weights anew; /spill where evicted KV blocks go to disk. Loading a model may take as long as
# RYZANSTEIN_START_TIMEOUT says; what it does meanwhile is no failure.
FROM runtime AS executor
COPY --from=executor-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
ENV RYZANSTEIN_OPS_PORT=8081 \
    RYZANSTEIN_MODEL_CACHE=/models \
    HF_HOME=/models/.hub \
    TRITON_CACHE_DIR=/tmp/triton
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s --retries=3 CMD ["ryzanstein", "probe", "executor"]
ENTRYPOINT ["ryzanstein", "serve", "executor"]

# With a C compiler, by which Triton builds the launcher of each kernel; its cache must not be mounted noexec.
# Volume: /kernels, for TRITON_CACHE_DIR: what a container has compiled, the next one need not.
FROM executor AS executor-gpu
USER 0:0
# hadolint ignore=DL3008
RUN command -v gcc > /dev/null || { \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    } && install -d -o 10001 -g 10001 /kernels
USER 10001:10001

# vLLM as the executor's engine (docs/engines.md), in vLLM's own image as BASE_IMAGE. The executor is in /opt/venv, which
# has that image's Python and none of its packages: nothing of vLLM's moves. VLLM_PYTHON is the Python that has vLLM.
# Volume: /kernels, for what vLLM, PyTorch and Triton compile; it must not be mounted noexec, and /tmp neither.
FROM runtime AS executor-vllm
ARG VLLM_PYTHON=/usr/bin/python3
USER 0:0
RUN test ! -e /opt/venv \
    && "${VLLM_PYTHON}" -c "import importlib.metadata; importlib.metadata.version('vllm')" 2> /dev/null \
    || { echo "error: BASE_IMAGE must have vLLM at ${VLLM_PYTHON} (name another Python with VLLM_PYTHON), and" \
              "nothing in /opt/venv" >&2; exit 1; } \
    && install -d -o 10001 -g 10001 /kernels
USER 10001:10001
COPY --from=executor-vllm-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
ENV RYZANSTEIN_OPS_PORT=8081 \
    RYZANSTEIN_MODEL_CACHE=/models \
    RYZANSTEIN_ENGINE=vllm \
    RYZANSTEIN_ENGINE_PYTHON=${VLLM_PYTHON} \
    HF_HOME=/models/.hub \
    VLLM_CACHE_ROOT=/kernels/vllm \
    TRITON_CACHE_DIR=/kernels/triton \
    TORCHINDUCTOR_CACHE_DIR=/kernels/inductor \
    FLASHINFER_WORKSPACE_BASE=/kernels
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=1800s --retries=3 CMD ["ryzanstein", "probe", "executor"]
ENTRYPOINT ["ryzanstein", "serve", "executor"]

# The operator's commands; no service, so nothing to check.
FROM runtime AS cli
COPY --from=cli-packages /opt/venv /opt/venv
COPY --from=package /opt/ryzanstein /opt/ryzanstein
HEALTHCHECK NONE
ENTRYPOINT ["ryzanstein"]

# --- the broker, with this release's users and rights ---------------------------------------------------------

FROM cli AS nats-files
RUN mkdir -p /tmp/data/jetstream && ryzanstein nats-config --listen 0.0.0.0:4222 --store /data/jetstream \
    --passwords ../../run/secrets/nats-passwords > /tmp/nats.conf

# Volume: /data. Secret: /run/secrets/nats-passwords, as `ryzanstein nats-config --help` describes it.
FROM ${NATS_IMAGE} AS nats
ARG NATS_IMAGE
LABEL org.opencontainers.image.base.name="${NATS_IMAGE}"
COPY --from=nats-files --chown=10001:10001 /tmp/data /data
COPY --from=nats-files /tmp/nats.conf /etc/nats/nats.conf
USER 10001:10001
EXPOSE 4222 8222
HEALTHCHECK --interval=2s --timeout=5s --start-period=60s --retries=5 \
    CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8222/healthz"]
ENTRYPOINT ["nats-server", "--config", "/etc/nats/nats.conf", "--http_port", "8222"]
