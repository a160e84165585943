"""What pods must and must not be: users, privileges, ports, probes, images, resources, the end of their lives.

Each check goes over all objects of one rendering and tells its faults as `Kind/name: path: words`.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from sidecar.inject import names
from sidecar.inject.container import CUT_S
from sidecar.inject.names import ISTIO_USER, NAME, POLICY_PATH, RUN_PATH, RUN_VOLUME, SOCKET
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.load import load, with_upstreams
from sidecar.settings import Settings, UsageError, from_arguments
from sidecar.verbs.tree import tree
from tests.deploy.objects import Object, called, containers, of_kind, pods, seconds

Check = Callable[[list[Object]], Iterator[str]]

ISTIO_PORTS = range(15000, 15100)
GPU = "nvidia.com/gpu"
READ = {value for value in vars(names).values() if isinstance(value, str) and value.startswith(names.PREFIX)}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def ports(objects: list[Object]) -> Iterator[str]:
    """No port of Istio's, no port of the host."""
    for each, pod in pods(objects):
        for path, container in containers(pod):
            for index, port in enumerate(container.get("ports") or []):
                where = f"{called(each)}: {path}.ports[{index}]"
                if port["containerPort"] in ISTIO_PORTS:
                    yield f"{where}: {port['containerPort']} is istio-proxy's"
                if "hostPort" in port:
                    yield f"{where}: a port of the host"
    for each in of_kind(objects, "Service"):
        for index, port in enumerate(each["spec"]["ports"]):
            for key in ("port", "targetPort", "nodePort"):
                if port.get(key) in ISTIO_PORTS:
                    yield f"{called(each)}: spec.ports[{index}].{key}: {port[key]} is istio-proxy's"


def users(objects: list[Object]) -> Iterator[str]:
    """Nobody is root or istio-proxy, and kubelet is to check it."""
    for each, pod in pods(objects):
        of_pod = pod["spec"].get("securityContext") or {}
        for path, container in containers(pod):
            own = {**of_pod, **(container.get("securityContext") or {})}
            where = f"{called(each)}: {path}.securityContext"
            for key in ("runAsUser", "runAsGroup", "fsGroup"):
                if own.get(key) == ISTIO_USER:
                    yield f"{where}.{key}: {ISTIO_USER} is istio-proxy's"
            if ISTIO_USER in own.get("supplementalGroups", []):
                yield f"{where}.supplementalGroups: {ISTIO_USER} is istio-proxy's"
            if own.get("runAsNonRoot") is not True:
                yield f"{where}.runAsNonRoot: is not true"
            if not own.get("runAsUser"):
                yield f"{where}.runAsUser: is root, or whatever the image says"


def privileges(objects: list[Object]) -> Iterator[str]:
    """Nothing that a process does not need: capabilities, a writable root, the node's namespaces and files."""
    for each, pod in pods(objects):
        spec = pod["spec"]
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if spec.get(key):
                yield f"{called(each)}: spec.{key}: is on"
        for index, volume in enumerate(spec.get("volumes") or []):
            if "hostPath" in volume:
                yield f"{called(each)}: spec.volumes[{index}]: files of the host"
        of_pod = spec.get("securityContext") or {}
        for path, container in containers(pod):
            own = container.get("securityContext") or {}
            where = f"{called(each)}: {path}.securityContext"
            if own.get("privileged"):
                yield f"{where}.privileged: is on"
            if own.get("allowPrivilegeEscalation") is not False:
                yield f"{where}.allowPrivilegeEscalation: is not false"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{where}.readOnlyRootFilesystem: is not true"
            capabilities = own.get("capabilities") or {}
            if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
                yield f"{where}.capabilities: are not all dropped"
            profile = own.get("seccompProfile") or of_pod.get("seccompProfile") or {}
            if profile.get("type") != "RuntimeDefault":
                yield f"{where}.seccompProfile: is not the runtime's"


def tokens(objects: list[Object]) -> Iterator[str]:
    """No token of the API server's, no variables for each Service (VLLM_PORT stops a vLLM)."""
    for each, pod in pods(objects):
        for key in ("automountServiceAccountToken", "enableServiceLinks"):
            if pod["spec"].get(key) is not False:
                yield f"{called(each)}: spec.{key}: is not false"
    for each in of_kind(objects, "ServiceAccount"):
        if each.get("automountServiceAccountToken") is not False:
            yield f"{called(each)}: automountServiceAccountToken: is not false"


def images(objects: list[Object]) -> Iterator[str]:
    """Each image says which one it is."""
    for each, pod in pods(objects):
        for path, container in containers(pod):
            image = container["image"]
            _, _, tag = image.rpartition("/")[2].partition(":")
            if "@sha256:" not in image and tag in ("", "latest"):
                yield f"{called(each)}: {path}.image: {image} is another one each day"


def resources(objects: list[Object]) -> Iterator[str]:
    """CPU and memory are asked for and memory is bounded; a card is a whole one, and one."""
    for each, pod in pods(objects):
        for path, container in containers(pod):
            needs = container.get("resources") or {}
            asked, most = needs.get("requests") or {}, needs.get("limits") or {}
            where = f"{called(each)}: {path}.resources"
            for name in ("cpu", "memory"):
                if name not in asked:
                    yield f"{where}.requests.{name}: is not there"
            if "memory" not in most:
                yield f"{where}.limits.memory: is not there"
            for name in {*asked, *most}:
                if name.startswith("nvidia.com/") and name != GPU:
                    yield f"{where}: {name} is a part of a card"
            if GPU in most and most[GPU] != "1":
                yield f"{where}.limits: {GPU} is {most[GPU]}, not one card"
        if any(GPU in ((one.get("resources") or {}).get("limits") or {}) for _, one in containers(pod)):
            yield from _whole_card(each, pod)


def _whole_card(each: Object, pod: Object) -> Iterator[str]:
    needed = (pod["spec"].get("affinity") or {}).get("nodeAffinity", {})
    terms = needed.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    shunned = {
        one["key"]: one["values"] for term in terms for one in term["matchExpressions"] if one["operator"] == "NotIn"
    }
    if "single" not in shunned.get("nvidia.com/mig.strategy", []):
        yield f"{called(each)}: spec.affinity: {GPU} may be a part of a card (MIG)"
    if "time-slicing" not in shunned.get("nvidia.com/gpu.sharing-strategy", []):
        yield f"{called(each)}: spec.affinity: {GPU} may be a shared card"


def probes(objects: list[Object]) -> Iterator[str]:
    """What is bound to loopback is asked from within; the sidecar's start does not wait for the engine."""
    for each, pod in pods(objects):
        injected_later = "sidecar.infra.ai/inject" in pod["metadata"]["labels"]
        for path, container in containers(pod):
            where = f"{called(each)}: {path}"
            for key in PROBES:
                probe = container.get(key)
                if probe is None:
                    yield f"{where}.{key}: is not there"
                elif _on_loopback(container) and not injected_later and "exec" not in probe:
                    yield f"{where}.{key}: the container listens on loopback, where kubelet does not get to"
            if container["name"] == NAME:
                if container["startupProbe"].get("httpGet", {}).get("path") != "/livez":
                    yield f"{where}.startupProbe: must not wait for the engine, which starts later"
                if container.get("restartPolicy") != "Always" or not path.startswith("spec.initContainers"):
                    yield f"{where}: is no native sidecar"


def _on_loopback(container: Object) -> bool:
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    return any("127.0.0.1" in word for word in words)


def loopback(objects: list[Object]) -> Iterator[str]:
    """Nobody goes round the sidecar: beside it, and where it is to be injected, the engine listens on loopback."""
    for each, pod in pods(objects):
        if not (_sidecars(pod) or "sidecar.infra.ai/inject" in pod["metadata"]["labels"]):
            continue
        for path, container in containers(pod):
            if path.startswith("spec.containers") and not _on_loopback(container):
                yield f"{called(each)}: {path}: listens on the pod's address"
            if path.startswith("spec.containers") and container.get("ports"):
                yield f"{called(each)}: {path}.ports: nobody reaches them"


def _sidecars(pod: Object) -> list[tuple[str, Object]]:
    return [(path, each) for path, each in containers(pod) if each["name"] == NAME]


def _env(container: Object) -> dict[str, str]:
    values = {"metadata.name": "vllm-0", "spec.nodeName": "node-0"}
    made = {}
    for each in container.get("env") or []:
        if "value" in each:
            made[each["name"]] = each["value"]
        elif "fieldRef" in each.get("valueFrom", {}):
            made[each["name"]] = values[each["valueFrom"]["fieldRef"]["fieldPath"]]
        elif each["name"] == "REDIS_URL":
            made[each["name"]] = "redis://redis:6379"
    return made


def _told(container: Object) -> Settings | argparse.Namespace:
    """What the sidecar's program would make of a container; UsageError or SystemExit where it would not start."""
    arguments = tree().parse_args(container.get("args") or [])
    verb = (container.get("args") or [""])[0]
    return from_arguments(arguments, _env(container)) if verb in ("run", "demo") else arguments


def _variables() -> set[str]:
    """Variables that `sidecar run` reads: those of its flags, and those that have none."""
    run = tree().parse_args(["run"])
    flags = {f"SIDECAR_{name.upper()}" for name in vars(run) if name != "verb"}
    alone = {
        "SIDECAR_CONTROL_TOKEN",
        "SIDECAR_CACHE_SALT_KEY",
        "REDIS_URL",
        "LOG_LEVEL",
        "POD_NAME",
        "NODE_NAME",
        "ZONE",
    }
    return flags | alone


def settings(objects: list[Object]) -> Iterator[str]:
    """Flags and variables of our program are ones that it knows, and it would start with them."""
    known = _variables()
    for each, pod in pods(objects):
        for path, container in containers(pod):
            if not container["image"].rpartition("/")[2].startswith("llm-sidecar"):
                continue
            where = f"{called(each)}: {path}"
            for variable in container.get("env") or []:
                if variable["name"] not in known:
                    yield f"{where}.env: the sidecar reads no {variable['name']}"
            try:
                _told(container)
            except UsageError as exc:
                yield f"{where}: {exc}"
            except SystemExit:
                yield f"{where}.args: {container.get('args')} are no arguments of the sidecar's"
            hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec", {}).get("command") or [""]
            if hook[0] == "sidecar":
                try:
                    tree().parse_args(hook[1:])
                except SystemExit:
                    yield f"{where}.lifecycle.preStop: {hook} is no command of the sidecar's"


def words(objects: list[Object]) -> Iterator[str]:
    """Labels and annotations of ours on pods are ones that somebody reads."""
    for each, pod in pods(objects):
        for kind in ("labels", "annotations"):
            for name in pod["metadata"].get(kind) or {}:
                if name.startswith(names.PREFIX) and name not in READ:
                    yield f"{called(each)}: metadata.{kind}: nobody reads {name}"


def policies(objects: list[Object]) -> Iterator[str]:
    """The policy that a pod mounts is one that its sidecar takes, with the engine that its settings name."""
    maps = {each["metadata"]["name"]: each for each in of_kind(objects, "ConfigMap")}
    for each, pod in pods(objects):
        for path, container in _sidecars(pod):
            volume = next(one["name"] for one in container["volumeMounts"] if one["mountPath"] == POLICY_PATH)
            source = next(one for one in pod["spec"]["volumes"] if one["name"] == volume)
            mounted = maps.get(source.get("configMap", {}).get("name"))
            told = _settings(container)
            if mounted is None or told is None:
                continue
            try:
                files = [(name, text.encode()) for name, text in mounted["data"].items()]
                snapshot = with_upstreams(load(files, 1), told.upstreams)
            except PolicyErrors as exc:
                yield from (f"{called(mounted)}: data: {error}" for error in exc.errors)
            else:
                if not any(service.endpoints for service in snapshot.services):
                    yield f"{called(each)}: {path}: has no endpoint, by its policy or its settings"


def _settings(container: Object) -> Settings | None:
    try:
        told = _told(container)
    except (UsageError, SystemExit):
        return None
    return told if isinstance(told, Settings) else None


def grace(objects: list[Object]) -> Iterator[str]:
    """The pod's end is longer than the drain, whoever waits for it; and istio-proxy drains as long as we do."""
    for each, pod in pods(objects):
        for path, container in _sidecars(pod):
            told = _settings(container)
            if told is None:
                continue
            longest = told.settle_s + told.drain_s + CUT_S
            where = called(each)
            if pod["spec"].get("terminationGracePeriodSeconds", 30) <= longest:
                yield f"{where}: spec.terminationGracePeriodSeconds: is not longer than the drain, {longest:g} s"
            if _wait_s(container) < longest:
                yield f"{where}: {path}.lifecycle.preStop: does not wait for the drain, {longest:g} s"
            for engine_path, engine in containers(pod):
                if engine_path.startswith("spec.containers") and _wait_s(engine) < longest:
                    yield f"{where}: {engine_path}.lifecycle.preStop: does not wait for the drain, {longest:g} s"
            if pod["metadata"]["labels"].get("sidecar.istio.io/inject") == "false":
                continue
            config = pod["metadata"].get("annotations", {}).get("proxy.istio.io/config", "")
            drain = next((line.split(":")[1].strip() for line in config.splitlines() if "drainDuration" in line), "45s")
            if seconds(drain) < longest:
                yield f"{where}: proxy.istio.io/config: drainDuration {drain} cuts streams before the drain does"


def hanging(objects: list[Object]) -> Iterator[str]:
    """What its own probe finds hung is ended soon: a grace that is as long as streams is for the pod's end alone."""
    for each, pod in pods(objects):
        if not (_sidecars(pod) or "sidecar.infra.ai/inject" in pod["metadata"]["labels"]):
            continue
        for path, container in containers(pod):
            for key in ("startupProbe", "livenessProbe"):
                if container.get(key, {}).get("terminationGracePeriodSeconds", 640) > 60:
                    yield f"{called(each)}: {path}.{key}: what hangs has the pod's whole grace to end"


def _wait_s(container: Object) -> float:
    """How long a container's preStop waits for the sidecar's drain; 0 where it does not."""
    command: list[Any] = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec", {}).get("command", [])
    if command[:3] == ["sidecar", "drain", "--wait"]:
        return seconds(command[3])
    if any(SOCKET in word and "/drained" in word for word in command):
        return float(command[command.index(next(word for word in command if SOCKET in word)) + 1])
    return 0.0


def operators(objects: list[Object]) -> Iterator[str]:
    """Orders come by the socket alone, which is the pod's own and nobody's but the sidecar's and the engine's."""
    for each, pod in pods(objects):
        for path, container in _sidecars(pod):
            where = f"{called(each)}: {path}"
            told = _settings(container)
            if told is not None and (told.operators is None or told.operators.path != SOCKET):
                yield f"{where}.env: orders are not taken at {SOCKET} alone"
            mounts = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == RUN_PATH]
            source: Object = next((one for one in pod["spec"]["volumes"] if one["name"] in mounts), {})
            if source.get("emptyDir", {}).get("medium") != "Memory":
                yield f"{where}.volumeMounts: the socket's folder is not the pod's own, in memory"
            holders = [
                one["name"]
                for _, one in containers(pod)
                if any(mount["name"] == RUN_VOLUME for mount in one.get("volumeMounts") or [])
            ]
            if len(holders) > 2:
                yield f"{where}: the socket is mounted by {', '.join(holders)}"
            yield from _not_ours(each, pod, container)


def _not_ours(each: Object, pod: Object, sidecar: Object) -> Iterator[str]:
    """Others may connect to the socket, put none of their own there, and not be taken for us."""
    for path, one in containers(pod):
        if one is sidecar:
            continue
        if any(mount["name"] == RUN_VOLUME and not mount.get("readOnly") for mount in one.get("volumeMounts") or []):
            yield f"{called(each)}: {path}.volumeMounts: may put another socket there"
        if (one.get("securityContext") or {}).get("runAsUser") == names.USER:
            yield f"{called(each)}: {path}.securityContext.runAsUser: is the sidecar's, whose orders are taken"


def order(objects: list[Object]) -> Iterator[str]:
    """The sidecar starts first of all that is not the mesh's."""
    for each, pod in pods(objects):
        first = [one["name"] for one in pod["spec"].get("initContainers") or [] if not one["name"].startswith("istio")]
        if NAME in first and first[0] != NAME:
            yield f"{called(each)}: spec.initContainers: {first[0]} starts before {NAME}"


CHECKS: tuple[Check, ...] = (
    ports,
    users,
    privileges,
    tokens,
    images,
    resources,
    probes,
    loopback,
    settings,
    words,
    policies,
    grace,
    hanging,
    operators,
    order,
)
