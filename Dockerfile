# An image with the package and its pinned versions. Untested: it was never built where it was written.
#
#   docker build -t whetstone:cuda .                                     CUDA; the host needs NVIDIA's container toolkit
#   docker build -t whetstone --build-arg TORCH_INDEX=ADDRESS .          CPU
#
# ADDRESS is torch's index of CPU builds, as its install page has it: torch of the package index brings CUDA on x86-64.
#
#   docker run --rm -v "$PWD/outputs:/work/outputs" whetstone train max_steps=5
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/outputs:/work/outputs" whetstone:cuda train gsm8k ...
#
# Scoring of programs isolates them with namespaces or Landlock (docs/sandbox.md); `whet doctor` in the container says
# what is available there.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH_INDEX=
# The native engine and torch.compile build kernels when they are first used: a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /work
COPY pyproject.toml constraints.txt requirements.txt README.md LICENSE ./
COPY scripts scripts
COPY config config
COPY whetstone whetstone
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"; \
    fi \
    && pip install --no-cache-dir -c constraints.txt .

ENTRYPOINT ["whet"]
CMD ["--help"]
