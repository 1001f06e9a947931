# docker build -t flexengine . && docker run --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/data flexengine \
#     train --model Qwen/Qwen3-0.6B --mode auto --yes
# PyPI's torch brings the CUDA libraries; the driver is the host's. --ulimit lets host memory be page-locked.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
# Triton compiles a launcher for its kernels when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
ENV HF_HOME=/data/.cache/huggingface FLEXENGINE_CACHE=/data/.cache/flexengine
WORKDIR /data
ENTRYPOINT ["flexengine"]
