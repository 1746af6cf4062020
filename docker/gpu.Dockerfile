# maxtrain for NVIDIA GPUs. In the repository:
#
#   docker build -f docker/gpu.Dockerfile -t maxtrain:gpu .
#
# CUDA's libraries come with jax[cuda13]; the host needs the driver and NVIDIA's container toolkit.
FROM python:3.12-slim

# What else is installed: extras of pyproject.toml.
ARG EXTRAS=gpu,tokamax,chat,s3,gcs,sentencepiece,tiktoken,zstd

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/maxtrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY maxtrain/ maxtrain/
COPY data_pipeline/ data_pipeline/
COPY configs/ configs/
RUN python -m pip install --constraint constraints.txt ".[${EXTRAS}]"

# Pods and volumes of `maxtrain launch k8s` have this user, too.
RUN useradd --uid 1000 --home-dir /maxtrain --create-home maxtrain
USER maxtrain
WORKDIR /maxtrain

ENTRYPOINT ["maxtrain"]
CMD ["--help"]
