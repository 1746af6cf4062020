# maxtrain for TPUs. In the repository:
#
#   docker build -f docker/tpu.Dockerfile -t maxtrain:tpu .
#
# libtpu comes with jax[tpu], and needs nothing of the host but its devices.
FROM python:3.12-slim

# What else is installed: extras of pyproject.toml.
ARG EXTRAS=tpu,chat,s3,gcs,sentencepiece,tiktoken,zstd

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/maxtrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY maxtrain/ maxtrain/
COPY data_pipeline/ data_pipeline/
COPY configs/ configs/
RUN python -m pip install --constraint constraints.txt ".[${EXTRAS}]"

# Pods and volumes of `maxtrain launch gke-tpu` have this user, too.
RUN useradd --uid 1000 --home-dir /maxtrain --create-home maxtrain
USER maxtrain
WORKDIR /maxtrain

ENTRYPOINT ["maxtrain"]
CMD ["--help"]
