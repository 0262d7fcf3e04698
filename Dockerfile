# halfstep with a GPU: docker build -t halfstep . && docker run --rm --gpus all -v "$PWD:/work" halfstep doctor
# Linted by scripts/check; it is not built by our tests, which have no GPU.

FROM python:3.11.14-slim-bookworm AS wheel
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt build hatchling
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m build --wheel --no-isolation --outdir /wheel

# The wheels of PyTorch bring CUDA's libraries; from the base come the driver's interface and what it is checked with.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/opt/halfstep/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/halfstep \
    && useradd --create-home --uid 10001 halfstep
# Torch alone is most of the image: its layer stays when only halfstep changes.
COPY constraints.txt /tmp/constraints.txt
RUN pip install --constraint /tmp/constraints.txt torch torchvision
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --constraint /tmp/constraints.txt "$(echo /tmp/wheel/*.whl)[train,vision,diffusion,video]"
USER 10001
WORKDIR /work
ENTRYPOINT ["halfstep"]
CMD ["--help"]
