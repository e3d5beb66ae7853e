# The service as an image. `docker build -t memory-sidecar .` is all; how to run it is in deploy/README.md.
#
# It runs as uid 10001 on a read-only root file system and writes to two places: /data (the store) and /tmp (what passes
# through). Any base with Python 3.11 or newer, its venv module and a POSIX sh will do: --build-arg BASE=…
# A tag can be moved, a digest cannot: --build-arg DIGEST=sha256:… (deploy/README.md says where to find it).
ARG BASE=python:3.13-slim
ARG DIGEST=

FROM ${BASE}${DIGEST:+@}${DIGEST} AS build
WORKDIR /src
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/sidecar
# What is installed changes with the lock file, not with every line of the code: a layer of its own. What has another hash than
# is written there is not installed.
COPY requirements.lock ./
RUN /build/bin/pip --python /opt/sidecar/bin/python install --no-cache-dir --no-compile --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY sidecar sidecar
COPY adapters adapters
RUN /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/sidecar/bin/python install \
        --no-cache-dir --no-compile --no-deps /wheels/*.whl \
    # Nothing can be compiled later, the file system being read-only; unchecked: nothing is compared at each start.
    && /opt/sidecar/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/sidecar/lib

FROM ${BASE}${DIGEST:+@}${DIGEST}
LABEL org.opencontainers.image.title="memory-sidecar" \
      org.opencontainers.image.description="Makes an agent's memory outlive its sandbox." \
      org.opencontainers.image.licenses="Apache-2.0"
# Slim images come without the standard library's compiled files. The folders belong to the user, so that new volumes do.
RUN python3 -m compileall -q -j 0 -x '/(test|tests|idlelib|lib2to3|tkinter|turtledemo|site-packages|dist-packages)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && groupadd --gid 10001 sidecar \
    && useradd --uid 10001 --gid sidecar --home-dir /tmp --no-create-home --shell /usr/sbin/nologin sidecar \
    && install -d -o sidecar -g sidecar -m 0750 /data /sandboxes
COPY --from=build /opt/sidecar /opt/sidecar
# What is in it, for scanners: CycloneDX.
COPY deploy/sbom.cdx.json /opt/sidecar/share/sbom.cdx.json

# No VOLUME: with one, the engine would mount a nameless volume that goes with the container, and nobody would notice.
# As it is, `volume:/data` refuses to start until something is mounted there.
ENV PATH=/opt/sidecar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    MEMORY_SIDECAR_STORE=volume:/data \
    MEMORY_SIDECAR_SERVICE_LOCAL_ROOTS=/sandboxes

USER 10001:10001
WORKDIR /tmp
EXPOSE 8077
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 CMD ["python", "-I", "-S", "-c", "\
import http.client, sys; \
asked = http.client.HTTPConnection('localhost', 8077, timeout=4); \
asked.request('GET', '/healthz'); \
sys.exit(asked.getresponse().status != 200)"]

# Everybody on the network may knock at 0.0.0.0: it refuses to start without MEMORY_SIDECAR_TOKEN.
ENTRYPOINT ["memory-sidecar"]
CMD ["serve", "--bind", "0.0.0.0:8077"]
