"""Names, ports and paths of an injected pod. Docs, chart, manifests and the image say the same ones."""

from typing import Final

NAME: Final = "llm-sidecar"
IMAGE: Final = "llm-sidecar:0.1.0"

# Not 1337, whose traffic Istio does not redirect.
USER: Final = 65532
ISTIO_USER: Final = 1337

PROXY_PORT: Final = 9400
ADMIN_PORT: Final = 9401
CONTROL_PORT: Final = 9402
# Names tell Istio the protocol by what is before the dash.
PORT_NAMES: Final = {"http-llm": PROXY_PORT, "http-admin": ADMIN_PORT, "grpc-control": CONTROL_PORT}

RUN_VOLUME: Final = "llm-sidecar-run"
RUN_PATH: Final = "/run/llm-sidecar"
SOCKET: Final = "/run/llm-sidecar/admin.sock"
POLICY_VOLUME: Final = "llm-sidecar-policy"
POLICY_PATH: Final = "/etc/llm-sidecar/policy"
POLICY: Final = "llm-sidecar-policy"
REDIS_SECRET: Final = "llm-sidecar-redis"  # noqa: S105 - the name of one
REDIS_KEY: Final = "url"

LOOPBACK: Final = "127.0.0.1"

PREFIX: Final = "sidecar.infra.ai/"
INJECT: Final = "sidecar.infra.ai/inject"
STATUS: Final = "sidecar.infra.ai/status"
ENGINE: Final = "sidecar.infra.ai/engine"
ENGINE_CONTAINER: Final = "sidecar.infra.ai/engine-container"
ENGINE_PORT: Final = "sidecar.infra.ai/engine-port"
POLICY_NAME: Final = "sidecar.infra.ai/policy"
DRAIN: Final = "sidecar.infra.ai/drain-seconds"
BIND: Final = "sidecar.infra.ai/bind"
SIDECAR_IMAGE: Final = "sidecar.infra.ai/image"
CPU: Final = "sidecar.infra.ai/cpu"
CPU_LIMIT: Final = "sidecar.infra.ai/cpu-limit"
MEMORY: Final = "sidecar.infra.ai/memory"
MEMORY_LIMIT: Final = "sidecar.infra.ai/memory-limit"

ENABLED: Final = "enabled"
DISABLED: Final = "disabled"
