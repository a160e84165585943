"""The pod with the sidecar in it: one pure function there, one back.

1. Injected twice is injected once: what an annotation says was done is undone first, whatever version did it.
2. Everything that stands in the way is told at once, with its path; then nothing is done. What works and may surprise
   is a warning.
3. The container stands after the mesh's own in `initContainers` and before the user's: its start needs the mesh, and
   what the user starts first may need the engine's door.
4. Nothing of the pod as a whole is changed but its grace period, and what the mesh is told of ports and of its drain:
   no user, no group, no account, no network. A grace that is as long as streams is for the pod's end: an engine that
   its own probes find hung has as long as it had before.
5. An istio-proxy that is an ordinary container starts after ours, while Istio's rules may lead our startup probe to it
   already: each would wait for the other. So the pod asks for a native one, which Istio makes from 1.24 on. One that
   asks for the other is refused, unless those rules leave our admin port out. An ordinary one also ends with the
   engine, before the streams that pass it: that is told.
6. A pod whose containers all have their limits as requests (QoS class Guaranteed, which pinned CPUs need) stays one:
   the sidecar's requests become its limits.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.inject import hooks, status
from sidecar.inject.container import (
    DRAIN_S,
    Object,
    Resources,
    Sidecar,
    container,
    engine_mount,
    volumes,
)
from sidecar.inject.engines import MESH, Engine, Unclear, find
from sidecar.inject.names import (
    ADMIN_PORT,
    CPU,
    CPU_LIMIT,
    DISABLED,
    DRAIN,
    ENABLED,
    IMAGE,
    INJECT,
    ISTIO_USER,
    LOOPBACK,
    MEMORY,
    MEMORY_LIMIT,
    NAME,
    POLICY,
    POLICY_NAME,
    PORT_NAMES,
    PREFIX,
    PROXY_PORT,
    RUN_PATH,
    SIDECAR_IMAGE,
    STATUS,
    USER,
)
from sidecar.inject.shapes import Container, Hook, Needs, Pod, Probe, Spec, User
from sidecar.policy.duration import parse_seconds

MAX_DRAIN_S: Final = 3590
"""`sidecar drain --wait` takes an hour at most in seconds, and waits 10 s longer than streams may go on."""

INCLUDE_INBOUND: Final = "traffic.sidecar.istio.io/includeInboundPorts"
EXCLUDE_INBOUND: Final = "traffic.sidecar.istio.io/excludeInboundPorts"
NATIVE: Final = "sidecar.istio.io/nativeSidecar"
REWRITE: Final = "sidecar.istio.io/rewriteAppHTTPProbers"
TEMPLATES: Final = "inject.istio.io/templates"
MESH_CONFIG: Final = "proxy.istio.io/config"
SCRAPED_PORT: Final = "prometheus.io/port"
SYSTEM: Final = "kubernetes.io/os"
WINDOWS: Final = "windows"

_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
_DRAIN_OF_MESH: Final = re.compile(r"""drainDuration["']?\s*:\s*["']?([0-9a-z.]+)""")
MESH_DRAIN_S: Final = 45.0
"""Istio's default."""
USUAL_GRACE_S: Final = 30
"""What a pod has where it says nothing."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Defaults(msgspec.Struct, frozen=True):
    """What holds for pods whose annotations do not say otherwise."""

    version: str = "0.1.0"
    image: str = IMAGE
    pull_policy: str = "IfNotPresent"
    policy: str = POLICY
    drain_s: int = DRAIN_S
    resources: Resources = Resources()


class Problem(msgspec.Struct, frozen=True):
    """What is wrong, or surprising, and where in the pod: `spec.containers[0].ports[1]`; empty: as a whole."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class Injected(msgspec.Struct, frozen=True):
    """The pod with the sidecar."""

    pod: Object
    engine: Engine
    warnings: tuple[Problem, ...] = ()


class Declined(msgspec.Struct, frozen=True):
    """It stays as it is: it does not want one (`wished`), or did not ask and has nothing that looks like an engine."""

    why: Problem
    wished: bool = False


class Refused(msgspec.Struct, frozen=True):
    """It cannot have one."""

    problems: tuple[Problem, ...]


class Restored(msgspec.Struct, frozen=True):
    """The pod as it was; `warnings` of what was changed since and stays."""

    pod: Object
    warnings: tuple[Problem, ...] = ()


def inject(pod: Object, defaults: Defaults) -> Injected | Declined | Refused:
    """The pod (or a template of one) with the sidecar. `pod` itself is not changed."""
    restored = uninject(pod)
    if isinstance(restored, Refused):
        return restored
    before, kept = (pod, ()) if restored is None else (restored.pod, restored.warnings)
    view = msgspec.convert(before, Pod)
    wish = view.labels.get(INJECT)
    if wish not in (None, ENABLED, DISABLED):
        words = f'{INJECT} is "{wish}", not {ENABLED} or {DISABLED}'
        return Refused((Problem("metadata.labels", words),))
    if wish == DISABLED:
        return Declined(Problem("metadata.labels", f"{INJECT} is {DISABLED}"), wished=True)
    spec = view.spec or Spec()
    containers = spec.containers or []
    if not containers:
        return Refused((Problem("spec.containers", "there is no container"),))
    asked = wish == ENABLED or any(name.startswith(PREFIX) for name in view.annotations)
    try:
        engine = find(containers, view.annotations)
    except Unclear as exc:
        problem = Problem("spec.containers", str(exc))
        return Declined(problem) if exc.absent and not asked else Refused((problem,))
    problems = [*_in_the_way(spec, view, engine)]
    sidecar = _sidecar(view, spec, engine, defaults, problems)
    after = _with_sidecar(before, spec, engine, sidecar, problems)
    if problems:
        return Refused(tuple(problems))
    warnings = (*kept, *_warnings(spec, view, engine, after["spec"]["terminationGracePeriodSeconds"], sidecar.wait_s))
    return Injected(status.remember(before, after, defaults.version), engine, warnings)


def uninject(pod: Object) -> Restored | Refused | None:
    """The pod as it was before; None where nothing was injected."""
    try:
        msgspec.convert(pod, Pod)
        done = status.read(pod)
        if done is None:
            return None
        before, kept = status.undone(pod, done)
        msgspec.convert(before, Pod)
    except msgspec.ValidationError as exc:
        return Refused((_misshapen(exc),))
    except ValueError as exc:
        return Refused((Problem(f"metadata.annotations.{STATUS}", str(exc)),))
    words = "was changed after it was injected: it stays"
    return Restored(before, tuple(Problem(".".join(map(str, path)), words) for path in kept))


# What is in the way.


def _in_the_way(spec: Spec, view: Pod, engine: Engine) -> Iterator[Problem]:
    ports = {port: name for name, port in PORT_NAMES.items()}
    for path, each in _containers(spec):
        if each.name == NAME:
            yield Problem(path, f'a container has the name "{NAME}" and was not put there by `sidecar inject`')
            continue
        for index, port in enumerate(each.ports or ()):
            where = f"{path}.ports[{index}]"
            taken = port.container_port
            if taken in ports and port.protocol in (None, "TCP"):
                yield Problem(where, f"port {taken} is the sidecar's ({ports[taken]})")
            elif port.name in PORT_NAMES:
                yield Problem(where, f"the port's name \"{port.name}\" is the sidecar's")
        if each.name not in MESH:
            yield from _wrong_user(f"{path}.securityContext", each.security_context)
    yield from _wrong_user("spec.securityContext", spec.security_context)
    if (spec.os is not None and spec.os.name == WINDOWS) or (spec.node_selector or {}).get(SYSTEM) == WINDOWS:
        yield Problem("spec", "the pod is for Windows, and the sidecar's image for Linux")
    if engine.port in ports:
        yield Problem(f"spec.containers[{engine.container}]", f"the engine's port {engine.port} is the sidecar's")
    ours = {each["name"] for each in volumes(Sidecar())}
    for index, volume in enumerate(spec.volumes or ()):
        if volume.name in ours:
            yield Problem(f"spec.volumes[{index}]", f"the volume's name \"{volume.name}\" is the sidecar's")
    chosen = (spec.containers or [])[engine.container]
    for index, mount in enumerate(chosen.volume_mounts or ()):
        if mount.mount_path.rstrip("/") == RUN_PATH:
            where = f"spec.containers[{engine.container}].volumeMounts[{index}]"
            yield Problem(where, f"the sidecar's socket is at {RUN_PATH}")
    yield from _mesh_in_the_way(spec, view.annotations)


def _mesh_in_the_way(spec: Spec, said: dict[str, str]) -> Iterator[Problem]:
    if NAME in [each.strip() for each in said.get(TEMPLATES, "").split(",")]:
        where = f"metadata.annotations.{TEMPLATES}"
        yield Problem(where, f'Istio\'s template "{NAME}" adds the sidecar already: keep one of the two')
    if _ordinary(spec, said) and not _lists(said.get(EXCLUDE_INBOUND, ""), ADMIN_PORT):
        words = (
            f"istio-proxy is an ordinary container here: it waits for the sidecar's startup probe, and that for it:"
            f' set {NATIVE}: "true", or have {EXCLUDE_INBOUND} name {ADMIN_PORT}'
        )
        yield Problem("metadata.annotations", words)


def _ordinary(spec: Spec, said: dict[str, str]) -> bool:
    """Whether istio-proxy is no native sidecar, as far as can be seen: it comes later, mostly."""
    return any(each.name == "istio-proxy" for each in spec.containers or ()) or said.get(NATIVE) == "false"


def _wrong_user(path: str, user: User | None) -> Iterator[Problem]:
    if user is None:
        return
    for name, number in (("runAsUser", user.run_as_user), ("runAsGroup", user.run_as_group)):
        if number == ISTIO_USER:
            words = f"{ISTIO_USER} is istio-proxy's, whose traffic goes round the mesh: take another one"
            yield Problem(f"{path}.{name}", words)


def _containers(spec: Spec) -> Iterator[tuple[str, Container]]:
    for key, listed in (("containers", spec.containers), ("initContainers", spec.init_containers)):
        for index, each in enumerate(listed or ()):
            yield f"spec.{key}[{index}]", each


def _lists(ports: str, port: int) -> bool:
    return any(each.strip() in ("*", str(port)) for each in ports.split(","))


# What may surprise.


def _drain_of_mesh_s(config: str) -> float:
    """What the mesh's configuration of a pod says of istio-proxy's drain; that is YAML, or JSON."""
    found = _DRAIN_OF_MESH.search(config)
    try:
        return parse_seconds(found[1]) if found is not None else MESH_DRAIN_S
    except ValueError:
        return MESH_DRAIN_S


def _warnings(spec: Spec, view: Pod, engine: Engine, grace_s: int, wait_s: int) -> Iterator[Problem]:
    chosen = f"spec.containers[{engine.container}]"
    for note in engine.notes:
        yield Problem(chosen, f'engine "{engine.name}" {note}')
    if engine.kind != "vllm":
        words = (
            f"the policy must name the engine: an endpoint with url http://{LOOPBACK}:{engine.port} and engine"
            f" {engine.kind}, in ConfigMap {view.annotations.get(POLICY_NAME, POLICY)}"
        )
        yield Problem(chosen, words)
    theirs_by = ((spec.containers or [])[engine.container].security_context, spec.security_context)
    if next((each.run_as_user for each in theirs_by if each is not None and each.run_as_user is not None), 0) == USER:
        words = f"user {USER} is the sidecar's: what the engine orders by its socket is obeyed, and more than a drain"
        yield Problem(f"{chosen}.securityContext.runAsUser", words)
    if spec.host_network:
        ports = ", ".join(map(str, PORT_NAMES.values()))
        yield Problem("spec.hostNetwork", f"the ports {ports} are the node's, and Istio leaves such pods out")
    if spec.resources is not None and (spec.resources.requests or spec.resources.limits):
        yield Problem(
            "spec.resources", "what the sidecar asks for is of the pod's own: its containers may ask for no more"
        )
    for shared, key in ((spec.share_process_namespace, "shareProcessNamespace"), (spec.host_pid, "hostPID")):
        if shared:
            yield Problem(f"spec.{key}", "the engine sees the sidecar's process, and may end it if it is root")
    for index, port in enumerate((spec.containers or [])[engine.container].ports or ()):
        if port.host_port is not None and port.container_port in engine.closed and not spec.host_network:
            words = f"leads to {port.container_port}, which is on loopback now: nobody answers"
            yield Problem(f"{chosen}.ports[{index}].hostPort", words)
    theirs = spec.termination_grace_period_seconds
    if theirs is not None and theirs < grace_s:
        words = f"raised from {theirs} to {grace_s}, so that streams may end"
        yield Problem("spec.terminationGracePeriodSeconds", words)
    said = view.annotations
    if _lists(said.get(EXCLUDE_INBOUND, ""), PROXY_PORT):
        words = f"traffic to {PROXY_PORT} does not pass istio-proxy: no mTLS, no policy of the mesh"
        yield Problem(f"metadata.annotations.{EXCLUDE_INBOUND}", words)
    if _ordinary(spec, said):
        words = (
            f"istio-proxy is an ordinary container here, and ends with the engine: streams that are older than its"
            f" terminationDrainDuration ({MESH_CONFIG}; 5 s) are cut"
        )
        yield Problem("metadata.annotations", words)
    if said.get(REWRITE) == "false" and not _lists(said.get(EXCLUDE_INBOUND, ""), ADMIN_PORT):
        words = f"with strict mTLS kubelet does not get through to {ADMIN_PORT}: have {EXCLUDE_INBOUND} name it"
        yield Problem(f"metadata.annotations.{REWRITE}", words)
    if (config := said.get(MESH_CONFIG)) is not None and _drain_of_mesh_s(config) < wait_s:
        words = f"istio-proxy cuts streams that are older than its drainDuration: drainDuration: {wait_s}s"
        yield Problem(f"metadata.annotations.{MESH_CONFIG}", words)
    if "holdApplicationUntilProxyStarts" in said.get(MESH_CONFIG, ""):
        words = "holdApplicationUntilProxyStarts is for an ordinary istio-proxy; the sidecar needs a native one"
        yield Problem(f"metadata.annotations.{MESH_CONFIG}", words)
    scraped = said.get(SCRAPED_PORT, "")
    if scraped.isdigit() and int(scraped) in engine.closed:
        words = f"port {scraped} is on loopback now: only istio-proxy gets there. Ours are at {ADMIN_PORT}"
        yield Problem(f"metadata.annotations.{SCRAPED_PORT}", words)


# What is said of the sidecar.


def _sidecar(view: Pod, spec: Spec, engine: Engine, defaults: Defaults, problems: list[Problem]) -> Sidecar:
    said = view.annotations

    def quantity(name: str, default: str) -> str:
        text = said.get(name, default)
        if text and not _QUANTITY.fullmatch(text):
            problems.append(Problem(f"metadata.annotations.{name}", f'"{text}" is no quantity, such as 500m or 256Mi'))
        return text

    given = defaults.resources
    resources = Resources(
        cpu=quantity(CPU, given.cpu),
        memory=quantity(MEMORY, given.memory),
        cpu_limit=quantity(CPU_LIMIT, given.cpu_limit),
        memory_limit=quantity(MEMORY_LIMIT, given.memory_limit),
    )
    if guaranteed(spec) and CPU_LIMIT not in said and MEMORY_LIMIT not in said:
        memory = resources.memory if MEMORY in said else resources.memory_limit or resources.memory
        resources = Resources(resources.cpu, memory, resources.cpu, memory)
    policy = said.get(POLICY_NAME, defaults.policy)
    if not _NAME.fullmatch(policy):
        problems.append(Problem(f"metadata.annotations.{POLICY_NAME}", f'"{policy}" is no name of a ConfigMap'))
    drain = said.get(DRAIN, str(defaults.drain_s))
    if not (drain.isascii() and drain.isdigit() and len(drain) <= 6 and 1 <= int(drain) <= MAX_DRAIN_S):
        words = f'"{drain}" is not a number of seconds from 1 to {MAX_DRAIN_S}'
        problems.append(Problem(f"metadata.annotations.{DRAIN}", words))
        drain = str(DRAIN_S)
    return Sidecar(
        image=said.get(SIDECAR_IMAGE, defaults.image),
        pull_policy=defaults.pull_policy,
        policy=policy,
        upstream=f"http://{LOOPBACK}:{engine.port}" if engine.kind == "vllm" else "",
        drain_s=int(drain),
        resources=resources,
    )


def guaranteed(spec: Spec) -> bool:
    """Whether the pod's QoS class is Guaranteed, as far as it can be read: 1 and 1000m are taken for different."""
    return all(_limited(each.resources) for _, each in _containers(spec))


def _limited(needs: Needs | None) -> bool:
    limits, requests = (needs.limits, needs.requests) if needs is not None else (None, None)
    if not limits:
        return False
    # A request that is not there is its limit.
    asked = {**limits, **(requests or {})}
    return all(name in limits and str(asked[name]) == str(limits[name]) for name in ("cpu", "memory"))


# What is done.


def _with_sidecar(pod: Object, spec: Spec, engine: Engine, sidecar: Sidecar, problems: list[Problem]) -> Object:
    raw: Object = pod["spec"]
    after = dict(raw)
    theirs = spec.termination_grace_period_seconds
    raised = theirs is None or theirs < sidecar.grace_s
    hung_s = max(1, USUAL_GRACE_S if theirs is None else theirs) if raised else None
    after["containers"] = [
        _engine(each, (spec.containers or [])[index], index, engine, sidecar, hung_s, problems)
        if index == engine.container
        else each
        for index, each in enumerate(raw["containers"])
    ]
    if raised:
        grace_s = _grace_s(spec, engine, sidecar)
        after = _put(after, "terminationGracePeriodSeconds", grace_s, before=("initContainers", "containers"))
    first = raw.get("initContainers") or []
    mesh = [index for index, each in enumerate(first) if each["name"] in MESH]
    place = mesh[-1] + 1 if mesh else 0
    starts = [*first[:place], container(sidecar), *first[place:]]
    after = _put(after, "initContainers", starts, before=("containers",))
    after["volumes"] = [*(raw.get("volumes") or []), *volumes(sidecar)]
    metadata = dict(pod.get("metadata") or {})
    annotations = dict(metadata.get("annotations") or {})
    _include_inbound(annotations, engine)
    # Where Istio reads them: not in a pod on the node's network, which it leaves out.
    if not spec.host_network:
        annotations.setdefault(MESH_CONFIG, f"drainDuration: {sidecar.wait_s}s")
        if not _ordinary(spec, annotations):
            annotations.setdefault(NATIVE, "true")
    annotations[STATUS] = ""
    metadata["annotations"] = annotations
    changed = {**pod, "spec": after}
    return _put(changed, "metadata", metadata, before=("spec",))


def _include_inbound(annotations: dict[str, Any], engine: Engine) -> None:
    """Ports that the mesh is told to take in, if the engine's is one: the sidecar's takes its place."""
    ports = annotations.get(INCLUDE_INBOUND, "")
    if _lists(ports, engine.port) and not _lists(ports, PROXY_PORT):
        annotations[INCLUDE_INBOUND] = f"{ports},{PROXY_PORT}"


def _engine(
    raw: Object,
    view: Container,
    index: int,
    engine: Engine,
    sidecar: Sidecar,
    hung_s: int | None,
    problems: list[Problem],
) -> Object:
    """The engine's container. `hung_s`: what it has to end in when a probe of its fails; None: the pod's grace."""
    after = dict(raw)
    if engine.more:
        args = [*(raw.get("args") or []), *engine.more]
        after = _put(after, "args", args, behind=("command", "image", "name"))
    where = f"spec.containers[{index}]"
    probes: tuple[tuple[str, Probe | None], ...] = (
        ("startupProbe", view.startup_probe),
        ("livenessProbe", view.liveness_probe),
        ("readinessProbe", view.readiness_probe),
    )
    for key, probe in probes:
        if probe is not None:
            try:
                after[key] = hooks.from_within(raw[key], probe, view, engine)
            except hooks.Unresolved as exc:
                problems.append(Problem(f"{where}.{key}", str(exc)))
            if hung_s is not None and key != "readinessProbe" and probe.termination_grace_period_seconds is None:
                after[key] = {**after[key], "terminationGracePeriodSeconds": hung_s}
    try:
        lifecycle = dict(raw.get("lifecycle") or {})
        lifecycle["preStop"] = hooks.pre_stop(_hook(view), view, sidecar)
        after["lifecycle"] = lifecycle
    except hooks.Unresolved as exc:
        problems.append(Problem(f"{where}.lifecycle.preStop", str(exc)))
    after["volumeMounts"] = [*(raw.get("volumeMounts") or []), engine_mount()]
    return after


def _grace_s(spec: Spec, engine: Engine, sidecar: Sidecar) -> int:
    """The drain, and then what the engine has to end in: as long as before, where its own hook comes then."""
    theirs = spec.termination_grace_period_seconds or 0
    return max(sidecar.grace_s, sidecar.wait_s + theirs if _hook((spec.containers or [])[engine.container]) else 0)


def _hook(view: Container) -> Hook | None:
    return view.lifecycle.pre_stop if view.lifecycle is not None else None


def _put(
    mapping: Object, key: str, value: Any, *, before: tuple[str, ...] = (), behind: tuple[str, ...] = ()
) -> Object:
    """A mapping with a key: in its place, else before the first of some that is there, else behind one, else last."""
    if key in mapping:
        return {**mapping, key: value}
    places = list(mapping)
    at = next((places.index(each) for each in before if each in mapping), -1)
    if at < 0:
        at = next((places.index(each) + 1 for each in behind if each in mapping), len(places))
    entries = list(mapping.items())
    entries.insert(at, (key, value))
    return dict(entries)


def _misshapen(exc: msgspec.ValidationError) -> Problem:
    """What msgspec says of an object that is no pod, with its path apart."""
    message, _, path = str(exc).partition(" - at `$")
    return Problem(path.rstrip("`").lstrip("."), message)
