# The sidecar's image: its compiled wheel and its dependencies on a slim Python, without compilers, under a numeric user.
#
#   docker build -t llm-sidecar .
#   docker run --rm -p 9400:9400 llm-sidecar run --upstream http://ENGINE:8000

FROM python:3.11-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# gcc compiles the request path (docs/adr/0007). Every dependency has wheels for linux/amd64 and linux/arm64; what has none
# where you build is compiled as well.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/build && python -m venv /opt/sidecar
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY sidecar ./sidecar
# The compiler goes by the types of the dependencies, so it works where they are installed; only the wheel goes on.
RUN /opt/build/bin/pip install '.[compile]' \
    && SIDECAR_COMPILE=1 /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .
# No pip at run time: nothing is to be installed into a running container.
RUN /opt/sidecar/bin/pip install /wheels/*.whl \
    && /opt/sidecar/bin/sidecar version | grep '(compiled)' \
    && /opt/sidecar/bin/pip uninstall --yes pip setuptools

FROM python:3.11-slim
COPY --from=build /opt/sidecar /opt/sidecar
ENV PATH=/opt/sidecar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SIDECAR_LISTEN=:9400 \
    SIDECAR_ADMIN=:9401 \
    SIDECAR_CONTROL=:9402
# A number, so that runAsNonRoot can be checked; not 1337, whose traffic Istio does not redirect.
USER 10001:10001
EXPOSE 9400 9401 9402
STOPSIGNAL SIGTERM
# Liveness, not readiness: while every breaker is open a sidecar is not ready, and restarting it would forget why.
# Set another one where SIDECAR_ADMIN is `off` or a unix socket.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/livez' % os.environ['SIDECAR_ADMIN'].rpartition(':')[2], timeout=2)"]
ENTRYPOINT ["sidecar"]
CMD ["run"]
