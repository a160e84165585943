# The sidecar's image: its compiled wheel and its dependencies on a slim Python, under a numeric user. docs/image.md
#
#   make image
#   docker run --rm --read-only -p 9400:9400 llm-sidecar:0.1.0 run --upstream http://ENGINE:8000
#
# Both bases are tags, to which a digest can be added: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
# The builder's has gcc and Python's headers already, so that nothing is installed but what the lock files name by hash.
ARG BUILDER=python:3.11-bookworm
ARG BASE=python:3.11-slim-bookworm

FROM ${BUILDER} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The second environment is what is shipped. It has no pip: nothing is to be installed into a running container. The first
# compiles, and sees the second: the compiler goes by the types of the dependencies. Some wheels come with symbols, 25 MB
# in all; our own library keeps them, for perf.
COPY requirements.lock requirements-build.lock ./
RUN python -m venv /opt/build \
    && python -m venv --without-pip /opt/sidecar \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements-build.lock \
    && /opt/build/bin/pip --python /opt/sidecar/bin/python install --require-hashes --only-binary :all: --no-compile -r requirements.lock \
    && find /opt/sidecar/lib -name "*.so" -exec strip --strip-unneeded {} + \
    && echo /opt/sidecar/lib/python3.11/site-packages > /opt/build/lib/python3.11/site-packages/sidecar.pth
COPY pyproject.toml setup.py README.md LICENSE ./
COPY sidecar ./sidecar
# The time that the wheel's files have: zip's first unless told (make image tells the commit's).
ARG SOURCE_DATE_EPOCH=315532800
# gcc compiles the request path (docs/adr/0007). Byte code that is not checked against its source: the root is read only.
RUN SIDECAR_COMPILE=1 /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/sidecar/bin/python install --no-index --no-deps --no-compile /wheels/*.whl \
    && /opt/build/bin/pip --python /opt/sidecar/bin/python check \
    && /opt/sidecar/bin/python -m compileall -q -f -j 0 --invalidation-mode unchecked-hash /opt/sidecar/lib

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1980-01-01T00:00:00Z
LABEL org.opencontainers.image.title="llm-sidecar" \
    org.opencontainers.image.description="A sidecar for LLM engines: relays streams byte-exact, judges them at their end, breaks on evidence" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.created="${CREATED}" \
    org.opencontainers.image.base.name="${BASE}"
# The base has the standard library as source alone: each start, and each health check, would compile it anew.
RUN ["python", "-m", "compileall", "-q", "-f", "-j", "0", "--invalidation-mode", "unchecked-hash", "-x", "site-packages|/(config-.*|ensurepip|idlelib|lib2to3|pydoc_data|test|tkinter|turtledemo)/", "/usr/local/lib/python3.11"]
COPY --from=build /opt/sidecar /opt/sidecar
# Nothing writes byte code: all that is used has it, and the root is read only. Lines of the log leave when written.
ENV PATH=/opt/sidecar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SIDECAR_LISTEN=:9400 \
    SIDECAR_ADMIN=:9401 \
    SIDECAR_CONTROL=:9402
# A number, so that runAsNonRoot can be checked; not 1337, whose traffic Istio does not redirect.
USER 65532:65532
EXPOSE 9400 9401 9402
STOPSIGNAL SIGTERM
# Liveness, not readiness: while every breaker is open a sidecar is not ready, and restarting it would forget why.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 CMD ["sidecar", "status", "--live"]
ENTRYPOINT ["sidecar"]
CMD ["run"]
