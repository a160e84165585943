"""What objects say of each other: names, ports, labels, keys.

Each check goes over all objects of one rendering and tells its faults as `Kind/name: path: words`. What is outside of a
rendering is named in `EXTERNAL`, with who makes it.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from tests.deploy.objects import ISTIO, ROOT, Object, called, containers, of_kind, pods, read

Check = Callable[[list[Object]], Iterator[str]]

EXTERNAL = {
    "Secret": {"llm-sidecar-redis"},  # an operator of the overlay `prod` makes it, as its kustomization says
    "ServiceAccount": {"waypoint"},  # Istio makes it for the Gateway of that name
}

SPLIT = 10_000


def _fits(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def _selected(objects: list[Object], selector: dict[str, str]) -> list[Object]:
    return [pod for _, pod in pods(objects) if _fits(selector, pod["metadata"].get("labels") or {})]


def _ports(chosen: list[Object]) -> set[int]:
    """Ports that every one of some pods has. Pods that are injected later have the sidecar's then."""
    sets = []
    for pod in chosen:
        found = {port["containerPort"] for _, each in containers(pod) for port in each.get("ports") or []}
        if pod["metadata"]["labels"].get("sidecar.infra.ai/inject") == "enabled":
            found |= {9400, 9401, 9402}
        sets.append(found)
    return set.intersection(*sets) if sets else set()


def _host(host: str) -> str:
    return host.partition(".")[0]


def _services(objects: list[Object]) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}


def workloads(objects: list[Object]) -> Iterator[str]:
    """A workload selects its own pods and no other's."""
    for each, pod in pods(objects):
        if each["kind"] == "Pod":
            continue
        selector = each["spec"]["selector"]["matchLabels"]
        if not _fits(selector, pod["metadata"]["labels"]):
            yield f"{called(each)}: spec.selector: does not fit the pod's labels"
        if len(_selected(objects, selector)) > 1:
            yield f"{called(each)}: spec.selector: fits another workload's pods, too"


def services(objects: list[Object]) -> Iterator[str]:
    """Services find pods, at ports that they have, by number."""
    for each in of_kind(objects, "Service"):
        chosen = _selected(objects, each["spec"].get("selector") or {})
        if not chosen:
            yield f"{called(each)}: spec.selector: fits no pod"
        for index, port in enumerate(each["spec"]["ports"]):
            target = port.get("targetPort")
            where = f"{called(each)}: spec.ports[{index}].targetPort"
            if not isinstance(target, int):
                yield f"{where}: {target} is no number: names of native sidecars' ports need Kubernetes 1.32"
            elif chosen and target not in _ports(chosen):
                yield f"{where}: {target} is no port of its pods"


def accounts(objects: list[Object]) -> Iterator[str]:
    """Service accounts are there."""
    there = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")}
    for each, pod in pods(objects):
        name = pod["spec"].get("serviceAccountName", "default")
        if name not in there:
            yield f"{called(each)}: spec.serviceAccountName: there is no {name}"


def configuration(objects: list[Object]) -> Iterator[str]:
    """ConfigMaps and their keys are there; Secrets are, or are optional, or cert-manager's, or an operator's."""
    maps = {each["metadata"]["name"]: set(each.get("data") or {}) for each in of_kind(objects, "ConfigMap")}
    secrets = {each["metadata"]["name"] for each in of_kind(objects, "Secret")} | EXTERNAL["Secret"]
    secrets |= {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    for each, pod in pods(objects):
        for where, kind, reference in _sources(pod):
            name = reference.get("name") or reference.get("secretName")
            if kind == "secret":
                if name not in secrets and not reference.get("optional"):
                    yield f"{called(each)}: {where}: there is no Secret {name}, and it is not optional"
                continue
            if name not in maps:
                yield f"{called(each)}: {where}: there is no ConfigMap {name}"
                continue
            keys = {item["key"] for item in reference.get("items") or []} | (
                {reference["key"]} if "key" in reference else set()
            )
            for key in sorted(keys - maps[name]):
                yield f"{called(each)}: {where}: ConfigMap {name} has no key {key}"


def _sources(pod: Object) -> Iterator[tuple[str, str, Object]]:
    for index, volume in enumerate(pod["spec"].get("volumes") or []):
        for key, kind in (("configMap", "config"), ("secret", "secret")):
            if key in volume:
                yield f"spec.volumes[{index}]", kind, volume[key]
    for path, each in containers(pod):
        for variable in each.get("env") or []:
            source = variable.get("valueFrom") or {}
            for key, kind in (("configMapKeyRef", "config"), ("secretKeyRef", "secret")):
                if key in source:
                    yield f"{path}.env.{variable['name']}", kind, source[key]
        for index, source in enumerate(each.get("envFrom") or []):
            for key, kind in (("configMapRef", "config"), ("secretRef", "secret")):
                if key in source:
                    yield f"{path}.envFrom[{index}]", kind, source[key]


def mounts(objects: list[Object]) -> Iterator[str]:
    """Each mount has its volume, each volume a mount, and no path is mounted twice."""
    for each, pod in pods(objects):
        there = {volume["name"] for volume in pod["spec"].get("volumes") or []}
        used = set()
        for path, container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
            if len(paths) != len(set(paths)):
                yield f"{called(each)}: {path}.volumeMounts: one path twice"
            for mount in container.get("volumeMounts") or []:
                used.add(mount["name"])
                if mount["name"] not in there:
                    yield f"{called(each)}: {path}.volumeMounts: there is no volume {mount['name']}"
        for name in sorted(there - used):
            yield f"{called(each)}: spec.volumes: nobody mounts {name}"


def selectors(objects: list[Object]) -> Iterator[str]:
    """What selects pods, by label or by what it is attached to, finds some."""
    for each in objects:
        spec = each.get("spec") or {}
        match each["kind"]:
            case "PodDisruptionBudget":
                chosen = (spec.get("selector") or {}).get("matchLabels") or {}
            case "NetworkPolicy":
                chosen = (spec.get("podSelector") or {}).get("matchLabels") or {}
            case "EnvoyFilter":
                chosen = (spec.get("workloadSelector") or {}).get("labels") or {}
            case "PeerAuthentication" | "RequestAuthentication" | "AuthorizationPolicy" | "Telemetry":
                if "targetRefs" in spec:
                    yield from _targets(each, objects)
                    continue
                chosen = (spec.get("selector") or {}).get("matchLabels") or {}
            case _:
                continue
        if not _selected(objects, chosen):
            yield f"{called(each)}: spec: its selector fits no pod"


def _targets(each: Object, objects: list[Object]) -> Iterator[str]:
    for index, reference in enumerate(each["spec"]["targetRefs"]):
        if not any(
            one["kind"] == reference["kind"] and one["metadata"]["name"] == reference["name"] for one in objects
        ):
            yield f"{called(each)}: spec.targetRefs[{index}]: there is no {reference['kind']} {reference['name']}"


def closed_ports(objects: list[Object]) -> Iterator[str]:
    """Ports that policies speak of are ports of the pods that they select. Istio's own are istio-proxy's."""
    for each in of_kind(objects, "AuthorizationPolicy", "NetworkPolicy", "PeerAuthentication"):
        spec = each["spec"]
        labels = (spec.get("selector") or spec.get("podSelector") or {}).get("matchLabels")
        if labels is None:
            continue
        there = _ports(_selected(objects, labels))
        for port in _policy_ports(each["kind"], spec):
            if port not in there and not 15000 <= port < 15100:
                yield f"{called(each)}: spec: {port} is no port of its pods"


def _policy_ports(kind: str, spec: Object) -> Iterator[int]:
    match kind:
        case "AuthorizationPolicy":
            for rule in spec.get("rules") or []:
                for to in rule.get("to") or []:
                    yield from map(int, to["operation"].get("ports") or [])
        case "NetworkPolicy":
            for rule in spec.get("ingress") or []:
                yield from (port["port"] for port in rule.get("ports") or [])
        case _:
            yield from map(int, spec.get("portLevelMtls") or {})


def plain_ports(objects: list[Object]) -> Iterator[str]:
    """What goes past istio-proxy is not encrypted by callers' proxies: they go by the PeerAuthentication."""
    for each, pod in pods(objects):
        excluded = (pod["metadata"].get("annotations") or {}).get("traffic.sidecar.istio.io/excludeInboundPorts", "")
        for port in filter(None, excluded.split(",")):
            for one in of_kind(objects, "PeerAuthentication"):
                mode = (one["spec"].get("portLevelMtls") or {}).get(port, {}).get("mode")
                if _fits(one["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]) and mode != "DISABLE":
                    where = f"{called(one)}: spec.portLevelMtls"
                    yield f"{where}: callers speak TLS to {port}, where {called(each)} does not"


def budgets(objects: list[Object]) -> Iterator[str]:
    """Machines can be emptied, however few pods there are: a budget says how many may be away."""
    for each in of_kind(objects, "PodDisruptionBudget"):
        if each["spec"].get("maxUnavailable") in (None, 0, "0%"):
            yield f"{called(each)}: spec: where there is one pod its machine cannot be emptied"


def neighbours(objects: list[Object]) -> Iterator[str]:
    """Callers that are let in by where they are, are of this namespace, or look after all (monitoring)."""
    for each in of_kind(objects, "AuthorizationPolicy"):
        own = each["metadata"].get("namespace")
        sources = [one["source"] for rule in each["spec"].get("rules") or [] for one in rule.get("from") or []]
        named = {name for source in sources for name in source.get("namespaces") or []}
        named |= {name.split("/")[2] for source in sources for name in source.get("principals") or []}
        for name in sorted(named - {own, "monitoring"}):
            yield f"{called(each)}: spec.rules: lets in who is in {name}, and is in {own}"


def routes(objects: list[Object]) -> Iterator[str]:
    """Routes lead to Services, their ports and their versions; parts are of 10,000; nothing is retried or timed."""
    services_by_name = _services(objects)
    subsets = {
        (_host(each["spec"]["host"]), subset["name"])
        for each in of_kind(objects, "DestinationRule")
        for subset in each["spec"].get("subsets") or []
    }
    for each in of_kind(objects, "VirtualService"):
        for host in each["spec"]["hosts"]:
            if _host(host) not in services_by_name:
                yield f"{called(each)}: spec.hosts: there is no Service {host}"
        for index, http in enumerate(each["spec"]["http"]):
            where = f"{called(each)}: spec.http[{index}]"
            if http.get("retries") != {"attempts": 0}:
                yield f"{where}.retries: the sidecar retries, and nobody else"
            if "timeout" in http:
                yield f"{where}.timeout: the policy says how long an answer may take"
            parts = [one["weight"] for one in http["route"] if "weight" in one]
            if len(http["route"]) > 1 and (len(parts) != len(http["route"]) or sum(parts) != SPLIT):
                yield f"{where}.route: parts are {parts}, not of {SPLIT}"
            for one in http["route"]:
                yield from _destination(where, one["destination"], services_by_name, subsets)
        if "match" in each["spec"]["http"][-1]:
            yield f"{called(each)}: spec.http: what nothing matches is answered 404"


def _destination(where: str, to: Object, by_name: dict[str, Object], subsets: set[tuple[str, str]]) -> Iterator[str]:
    host = _host(to["host"])
    service = by_name.get(host)
    if service is None:
        yield f"{where}.route: there is no Service {to['host']}"
        return
    if to.get("port", {}).get("number") not in {port["port"] for port in service["spec"]["ports"]}:
        yield f"{where}.route: Service {host} has no such port"
    if "subset" in to and (host, to["subset"]) not in subsets:
        yield f"{where}.route: no DestinationRule has the subset {to['subset']}"


def versions(objects: list[Object]) -> Iterator[str]:
    """DestinationRules are for Services, their subsets for pods that are behind them."""
    by_name = _services(objects)
    for each in of_kind(objects, "DestinationRule"):
        service = by_name.get(_host(each["spec"]["host"]))
        if service is None:
            yield f"{called(each)}: spec.host: there is no Service {each['spec']['host']}"
            continue
        for index, subset in enumerate(each["spec"].get("subsets") or []):
            if not _selected(objects, {**service["spec"]["selector"], **subset["labels"]}):
                yield f"{called(each)}: spec.subsets[{index}]: fits no pod of the Service"


def scaling(objects: list[Object]) -> Iterator[str]:
    """An autoscaler has something to scale, which does not say itself how many it is."""
    for each in of_kind(objects, "HorizontalPodAutoscaler"):
        target = each["spec"]["scaleTargetRef"]
        found = [
            one
            for one in objects
            if (one["kind"], one["apiVersion"], one["metadata"]["name"])
            == (target["kind"], target["apiVersion"], target["name"])
        ]
        if not found:
            yield f"{called(each)}: spec.scaleTargetRef: there is no {target['kind']} {target['name']}"
        elif "replicas" in found[0]["spec"]:
            yield f"{called(each)}: spec: {called(found[0])} says how many, too: each apply would undo this"
        for index, metric in enumerate(each["spec"]["metrics"]):
            name = metric["pods"]["metric"]["name"]
            if f'"{name}"' not in _series():
                yield f"{called(each)}: spec.metrics[{index}]: the sidecar has no {name}"


@cache
def _series() -> str:
    """The sources that name the sidecar's metrics."""
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "sidecar" / "telemetry").glob("*.py"))


def priorities(objects: list[Object]) -> Iterator[str]:
    """Priority classes are there."""
    there = {each["metadata"]["name"] for each in of_kind(objects, "PriorityClass")}
    for each, pod in pods(objects):
        name = pod["spec"].get("priorityClassName")
        if name is not None and name not in there and not name.startswith("system-"):
            yield f"{called(each)}: spec.priorityClassName: there is no {name}"


def monitors(objects: list[Object]) -> Iterator[str]:
    """What is scraped is a Service's port, by name, and the admin port behind it."""
    for each in of_kind(objects, "ServiceMonitor"):
        chosen = [
            one
            for one in of_kind(objects, "Service")
            if _fits(each["spec"]["selector"]["matchLabels"], one["metadata"].get("labels") or {})
        ]
        if len(chosen) != 1:
            yield f"{called(each)}: spec.selector: fits {len(chosen)} Services"
            continue
        ports = {port["name"]: port["targetPort"] for port in chosen[0]["spec"]["ports"]}
        for index, endpoint in enumerate(each["spec"]["endpoints"]):
            if ports.get(endpoint["port"]) != 9401:
                yield f"{called(each)}: spec.endpoints[{index}].port: {endpoint['port']} does not lead to the metrics"


def webhooks(objects: list[Object]) -> Iterator[str]:
    """A webhook is asked before Istio's, at a Service that is there, with a certificate for its name."""
    by_name = _services(objects)
    for each in of_kind(objects, "MutatingWebhookConfiguration"):
        if not each["metadata"]["name"] < "istio-":
            yield f"{called(each)}: metadata.name: sorts behind Istio's"
        for index, hook in enumerate(each["webhooks"]):
            where = f"{called(each)}: webhooks[{index}].clientConfig.service"
            asked = hook["clientConfig"]["service"]
            service = by_name.get(asked["name"])
            if service is None or service["metadata"]["namespace"] != asked["namespace"]:
                yield f"{where}: there is no Service {asked['name']} in {asked['namespace']}"
            elif asked.get("port", 443) not in {port["port"] for port in service["spec"]["ports"]}:
                yield f"{where}.port: the Service has no port {asked.get('port', 443)}"
            name = f"{asked['name']}.{asked['namespace']}.svc"
            if not any(name in one["spec"]["dnsNames"] for one in of_kind(objects, "Certificate")):
                yield f"{where}: no Certificate is for {name}"
            chosen = each["metadata"].get("annotations", {}).get("cert-manager.io/inject-ca-from", "")
            if chosen not in {
                f"{one['metadata'].get('namespace')}/{one['metadata']['name']}"
                for one in of_kind(objects, "Certificate")
            }:
                yield f"{called(each)}: metadata.annotations: there is no Certificate {chosen}"


def providers(objects: list[Object]) -> Iterator[str]:
    """Telemetry's providers are in the mesh's configuration, as we document it."""
    for each in of_kind(objects, "Telemetry"):
        for part in ("tracing", "accessLogging", "metrics"):
            for one in each["spec"].get(part) or []:
                for provider in one.get("providers") or []:
                    if provider["name"] not in _providers():
                        yield f"{called(each)}: spec.{part}: the mesh has no provider {provider['name']}"


@cache
def _providers() -> frozenset[str]:
    (values,) = read((ISTIO / "mesh" / "values.yaml").read_text(encoding="utf-8"))
    return frozenset(each["name"] for each in values["meshConfig"]["extensionProviders"])


def waypoints(objects: list[Object]) -> Iterator[str]:
    """A Service uses a waypoint that is there. With one there is nothing that waypoints do not take."""
    gateways = {each["metadata"]["name"] for each in of_kind(objects, "Gateway")}
    for each in of_kind(objects, "Service"):
        name = (each["metadata"].get("labels") or {}).get("istio.io/use-waypoint")
        if name is not None and name not in gateways:
            yield f"{called(each)}: metadata.labels: there is no waypoint {name}"
    if gateways:
        for each in of_kind(objects, "EnvoyFilter", "Sidecar"):
            yield f"{called(each)}: waypoints take no {each['kind']}"
    for each in of_kind(objects, "Gateway"):  # Istio gives its labels to the pods that it makes
        for other in objects:
            selector = (other.get("spec") or {}).get("selector") or (other.get("spec") or {}).get("podSelector") or {}
            chosen = selector if other["kind"] == "Service" else selector.get("matchLabels")
            if chosen and _fits(chosen, each["metadata"].get("labels") or {}):
                yield f"{called(each)}: metadata.labels: {called(other)} takes the waypoint's pods for its own"


def doors(objects: list[Object]) -> Iterator[str]:
    """Who may come in is said of each port: a NetworkPolicy sees one alone of what comes by ztunnel."""
    for each in of_kind(objects, "AuthorizationPolicy"):
        if each["spec"].get("action", "ALLOW") == "ALLOW":
            for index, rule in enumerate(each["spec"].get("rules") or []):
                if not rule.get("from") or not all(one.get("source") for one in rule["from"]):
                    yield f"{called(each)}: spec.rules[{index}].from: lets everybody in"


def issuers(objects: list[Object]) -> Iterator[str]:
    """Tokens are asked for where they are verified, and everybody means the same issuer."""
    named: dict[str, set[str]] = {}
    for each in of_kind(objects, "RequestAuthentication"):
        named[called(each)] = {rule["issuer"] for rule in each["spec"]["jwtRules"]}
        asked = {
            principal
            for policy in of_kind(objects, "AuthorizationPolicy")
            for rule in policy["spec"].get("rules") or []
            for one in rule.get("from") or []
            for principal in one["source"].get("requestPrincipals") or []
        }
        if not asked:
            yield f"{called(each)}: lets requests without a token through: an AuthorizationPolicy has to ask for one"
        elif "*" not in asked:
            named["AuthorizationPolicy"] = {principal.rpartition("/")[0] for principal in asked}
    for each in of_kind(objects, "ConfigMap"):
        found = {issuer for text in each["data"].values() for issuer in _policy_issuers(text)}
        if found:
            named[called(each)] = found
    if len({frozenset(each) for each in named.values()}) > 1:
        yield f"issuers differ: {json.dumps({name: sorted(each) for name, each in named.items()})}"


def _policy_issuers(text: str) -> Iterator[str]:
    for document in read(text):
        jwt: Any = (document.get("identity") or {}).get("jwt") or {}
        yield from jwt.get("issuers") or []
        yield from (provider["issuer"] for provider in jwt.get("providers") or [])


def namespaces(objects: list[Object]) -> Iterator[str]:
    """All that has a namespace says so, and it is one."""
    clusterwide = ("Namespace", "PriorityClass", "MutatingWebhookConfiguration", "CustomResourceDefinition")
    found = {each["metadata"].get("namespace") for each in objects if each["kind"] not in clusterwide}
    if len(found) > 1 or None in found:
        yield f"namespaces are {sorted(map(str, found))}"


CHECKS: tuple[Check, ...] = (
    workloads,
    services,
    accounts,
    configuration,
    mounts,
    selectors,
    closed_ports,
    plain_ports,
    budgets,
    neighbours,
    routes,
    versions,
    scaling,
    priorities,
    monitors,
    webhooks,
    providers,
    waypoints,
    doors,
    issuers,
    namespaces,
)
