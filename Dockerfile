# Lockstep on NVIDIA GPUs. README says how to build and run it.
#
# --shm-size: with --tp-size above 1, NCCL moves data between the GPUs' processes through /dev/shm, of which docker gives
# 64 MB unless told otherwise. The volume keeps downloaded models and compiled kernels from one run to the next.

# devel, not runtime: FlashInfer and Triton compile kernels on first use, which takes nvcc, a C compiler and Python's
# headers.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home lockstep

ENV PATH=/opt/lockstep/bin:$PATH TRITON_CACHE_DIR=/home/lockstep/.cache/triton
WORKDIR /src
COPY pyproject.toml setup.cfg setup.py README.md LICENSE launch.py ./
COPY srt srt
COPY radix radix
COPY detokenizer detokenizer
RUN python3 -m venv /opt/lockstep && pip install --no-cache-dir '.[cuda]'

USER lockstep
WORKDIR /home/lockstep
# The volume's folder has to belong to the user before docker mounts it.
RUN mkdir .cache

EXPOSE 30000
# A model may load for minutes, and nothing answers before it is there: the start period covers that.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["lockstep", "--host", "0.0.0.0"]
