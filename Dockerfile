# docker build --target cpu -t rollmatch:cpu .
# docker build --target gpu -t rollmatch:gpu .
# docker run --gpus all --shm-size 16g -v /data:/data rollmatch:gpu train +experiment=... telemetry.run_dir=/data/run
#
# NOT RUN: nothing was built of it yet. A test reads what it names (tests/deploy/test_deploy.py).
FROM python:3.11-slim-bookworm AS base
# vLLM needs libnuma, Triton compiles on a GPU, KubeRay's probes call wget. A login shell, which KubeRay starts Ray with, has no PATH of ours.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /rollmatch/.venv/bin/ray /rollmatch/.venv/bin/rollmatch /usr/local/bin/
WORKDIR /rollmatch
COPY . .
ENTRYPOINT ["rollmatch"]

# As `make setup` does it, for tests too.
FROM base AS cpu
RUN scripts/setup.sh
WORKDIR /work

# Not with scripts/setup.sh, which looks for a GPU: there is none while an image is built.
FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -m venv .venv && .venv/bin/pip install --no-cache-dir ".[gpu]"
WORKDIR /work
