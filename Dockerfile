# One image for every role: `photon <role> serve --config /etc/photon/photon.toml --name NAME`.
# Built alike by BuildKit and by the builder before it. docs/deployment.md
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS build
# Wheels laid into deploy/wheels are taken before those of the index; PIP_OPTIONS="--no-index" takes no others.
ARG PIP_OPTIONS=""
# A file in deploy/wheels with the certificates that pip is to trust, where a proxy opens TLS.
ARG CA_BUNDLE=""
COPY deploy/wheels /wheels
COPY requirements/run.txt requirements/image.txt /wheels/
RUN python3 -m venv /opt/photon \
 && /opt/photon/bin/pip install --quiet --no-cache-dir --disable-pip-version-check \
      --find-links /wheels ${CA_BUNDLE:+--cert /wheels/$CA_BUNDLE} ${PIP_OPTIONS} -r /wheels/image.txt
COPY pyproject.toml setup.cfg README.md LICENSE /source/
COPY photon /source/photon
COPY idregistry /source/idregistry
COPY eventstore /source/eventstore
COPY dispatcher /source/dispatcher
COPY joiner /source/joiner
COPY spark /source/spark
COPY millwheel /source/millwheel
RUN /opt/photon/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps \
      --find-links /wheels ${CA_BUNDLE:+--cert /wheels/$CA_BUNDLE} ${PIP_OPTIONS} /source

FROM ${BASE}
# New volumes take the owner of the directory that they cover.
RUN useradd --system --uid 10001 --user-group --home-dir /data --no-create-home --shell /usr/sbin/nologin photon \
 && install -d -o photon -g photon /data /logs /certs /etc/photon
COPY --from=build /opt/photon /opt/photon
# Large messages are freed and asked for again at each batch: keep their pages (photon/cluster/launching.py).
ENV PATH=/opt/photon/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MALLOC_MMAP_THRESHOLD_=67108864 \
    MALLOC_TRIM_THRESHOLD_=134217728 \
    MALLOC_TOP_PAD_=8388608 \
    OMP_NUM_THREADS=1 \
    OPENBLAS_NUM_THREADS=1 \
    GRPC_VERBOSITY=ERROR \
    PHOTON_CONFIG=/etc/photon/photon.toml
USER photon
WORKDIR /data
# PHOTON_ADDRESS: the gRPC address of the role that this container serves.
HEALTHCHECK --interval=30s --timeout=30s --start-period=60s --retries=3 CMD ["photon", "health"]
ENTRYPOINT ["photon"]
CMD ["--help"]
