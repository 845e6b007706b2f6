# docker build --target cpu -t rollmatch:cpu .
# docker build --target gpu -t rollmatch:gpu .
# docker run --gpus all --shm-size 16g -v /data:/data rollmatch:gpu train +experiment=... telemetry.run_dir=/data/run
#
# Commands run as user 1000, who needs write permission for /data (or run with --user, and -e HOME=/data for caches).
#
# NOT RUN: no image was built from it yet. A test checks the files and commands that it names (tests/deploy/test_deploy.py).
FROM python:3.11-slim-bookworm AS base
# vLLM needs libnuma, Triton compiles on a GPU, KubeRay's probes call wget. KubeRay starts Ray with a login shell, which does not have our PATH.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /rollmatch/.venv/bin/ray /rollmatch/.venv/bin/rollmatch /usr/local/bin/ \
    && useradd --uid 1000 --create-home rollmatch \
    && install -d -o rollmatch /work
WORKDIR /rollmatch
# The packages depend only on these files, so their layer is reused when a source file changes.
COPY pyproject.toml ./
COPY locks locks
COPY scripts scripts
ENTRYPOINT ["rollmatch"]

# Like `make setup`, also for tests.
FROM base AS cpu
RUN scripts/setup.sh cpu packages
COPY . .
RUN scripts/setup.sh cpu
USER rollmatch
WORKDIR /work

# There is no GPU while an image is built, so the extra is named explicitly.
FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN scripts/setup.sh gpu packages
COPY . .
RUN scripts/setup.sh gpu
USER rollmatch
WORKDIR /work
