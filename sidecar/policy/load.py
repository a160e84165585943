"""Files to one snapshot, or to every fault in all of them.

1. A file may hold several documents, and a List of Kubernetes is its items; files are taken in the order given, and a
   later document may not redefine a name.
2. All faults of all files are told together, up to `MAX_ERRORS`. A file whose syntax breaks off still has its first
   documents judged.
3. A CircuitBreakerPolicy is the mesh's word on one scope, and holds for every service, or those that it names, over
   what the service says; its fallback is for services that name none, unless it would lead back to them. An LLMService
   is a service and a TokenQuota a quota, like any of a Policy (`custom`).
4. A fallback that these files do not define is a warning and means none: the same object is handed to sidecars that
   know more services, and a policy that refuses to load serves nobody. A fallback to itself, or a loop, is a fault.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import endpoint_key as endpoint_key
from sidecar.policy.address import is_local
from sidecar.policy.check import check_fallbacks, check_service, warnings_of
from sidecar.policy.check_qos import check_class, check_identity, check_quota, qos_warnings_of
from sidecar.policy.custom import (
    check_breaker,
    check_llm_service,
    check_token_quota,
    mesh_fallback,
    quota_of,
    service_of,
    with_mesh,
    with_mesh_fallbacks,
)
from sidecar.policy.document import Mapping as MapNode
from sidecar.policy.document import Node, Scalar, documents
from sidecar.policy.document import Sequence as ListNode
from sidecar.policy.errors import Fault, Faults, PolicyError, PolicyErrors, Step, TooManyFaults, Within, path_of, quote
from sidecar.policy.read import Reader, line_of
from sidecar.policy.resources import Document, ListDocument, LlmServiceDocument, MeshBreakerDocument, TokenQuotaDocument
from sidecar.policy.schema import (
    DEFAULT_VERSION,
    Endpoint,
    Identity,
    MeshBreaker,
    PolicyDocument,
    QosPolicy,
    Quota,
    ReadyWhen,
    Service,
    Snapshot,
)

__all__ = ["PolicyError", "PolicyErrors", "endpoint_key", "load", "single", "unlisted", "with_upstreams"]

DEFAULT_SERVICE = "default"
UPSTREAM_FLAG = "--upstream"
KINDS = "CircuitBreakerPolicy, LLMService, Policy, TokenQuota"


def load(files: Sequence[tuple[str, bytes]], version: int) -> Snapshot:
    """The snapshot that `files` (name, content) make together; PolicyErrors with every fault otherwise.

    No files make a snapshot without services. Files without any document are a fault: nobody writes an empty policy,
    but copying truncates a file first.
    """
    return _Assembly().snapshot(files, version)


def single(upstreams: Sequence[str], version: int = 1) -> Snapshot:
    """The policy of `--upstream` without `--policy`: one service `default` for every model, all else by default.

    PolicyErrors for a bad or repeated URL.
    """
    return with_upstreams(Snapshot(version=version, services=()), upstreams)


def with_upstreams(snapshot: Snapshot, upstreams: Sequence[str]) -> Snapshot:
    """`snapshot` with `upstreams` added to its only service; with none, a service `default` is made for them.

    What a service lists already is added to none. PolicyErrors where there is something to add and several services, or
    an upstream is given twice.
    """
    listed = {endpoint_key(endpoint.url) for service in snapshot.services for endpoint in service.endpoints}
    new = [url for url in upstreams if _key(url) not in listed]
    if not new:
        return snapshot
    if len(snapshot.services) > 1:
        names = ", ".join(service.name for service in snapshot.services)
        said = f"{new[0]} is for the only service of a policy, and this one has several ({names}): list it in one"
        raise PolicyErrors([_flag_error(said)])
    if snapshot.services:
        service = snapshot.services[0]
    else:
        service = with_mesh(Service(name=DEFAULT_SERVICE), snapshot.mesh_breakers)
    version = _only_version(service)
    added = tuple(Endpoint(url=url, version=version, local=is_local(url)) for url in new)
    service = replace(service, endpoints=service.endpoints + added)
    faults = [_flag_error(f"{fault.message} ({path_of(fault.steps)})") for fault in check_service(service)]
    if faults:
        raise PolicyErrors(faults)
    warnings = list(snapshot.warnings)
    changed = replace(snapshot, services=(service,))
    _warn(changed, lambda words: None if words in warnings else warnings.append(words))
    return replace(changed, warnings=tuple(warnings))


def unlisted(name: str, models: Sequence[str], snapshot: Snapshot) -> Service:
    """A service that no file names: all by default, and the mesh's rules, its fallback among them, as for any."""
    service = with_mesh(Service(name=name, models=tuple(models) or (name,)), snapshot.mesh_breakers)
    return replace(service, fallback=mesh_fallback(name, snapshot.services, snapshot.mesh_breakers))


def _flag_error(message: str) -> PolicyError:
    return PolicyError(UPSTREAM_FLAG, 0, "$", message)


def _key(url: str) -> EndpointKey | None:
    """None for a bad URL, which is for the check to tell."""
    try:
        return endpoint_key(url)
    except ValueError:
        return None


def _only_version(service: Service) -> str:
    """What version an upstream has: the only one that `service` sends anything to, as long as nothing else tells."""
    wanted = [version for version, part in service.split.items() if part > 0]
    return wanted[0] if len(wanted) == 1 and not service.endpoints else DEFAULT_VERSION


class _Judge:
    """One document that was read: reports the faults of the rules that did not build on a fault of reading."""

    def __init__(self, file: str, tree: Node, reader: Reader, faults: Faults) -> None:
        self._file = file
        self._tree = tree
        self._reader = reader
        self._faults = faults
        self._wrong = frozenset(reader.wrong)
        self._around_wrong = frozenset(prefix for path in self._wrong for prefix in _prefixes(path))

    def fault(self, steps: Sequence[Step], message: str, needs: Sequence[Sequence[Step]] = ()) -> None:
        """Report `message` at `steps` into what was read, unless something there or in `needs` could not be read."""
        for place in (steps, *needs):
            path = path_of(self._reader.written(place))
            if path in self._around_wrong or not self._wrong.isdisjoint(_prefixes(path)):
                return
        written = self._reader.written(steps)
        self._faults.add(PolicyError(self._file, self._line(steps), path_of(written), message))

    def faults(self, faults: Iterable[Fault], at: tuple[Step, ...] = ()) -> None:
        """Report `faults`, whose steps start `at`."""
        for fault in faults:
            self.fault((*at, *fault.steps), fault.message, [(*at, *need) for need in fault.needs])

    def place(self, steps: Sequence[Step]) -> str:
        """`file:line` of `steps`."""
        return f"{self._file}:{self._line(steps)}"

    def _line(self, steps: Sequence[Step]) -> int:
        return line_of(self._tree, *self._reader.written(steps))


class _Definition(msgspec.Struct, frozen=True):
    """Where a name was defined, and where a service of that name says what it falls back to."""

    judge: _Judge
    steps: tuple[Step, ...]
    fallback: tuple[Step, ...]

    def __str__(self) -> str:
        return self.judge.place(self.steps)


class _Assembly:
    """What the documents read so far define, and where."""

    def __init__(self) -> None:
        self._faults = Faults()
        self._services: dict[str, Service] = {}
        self._qos: dict[str, QosPolicy] = {}
        self._quotas: dict[str, Quota] = {}
        self._mesh: dict[str, MeshBreaker] = {}
        self._identity = Identity()
        self._ready_when: ReadyWhen = "any"
        self._defined: dict[str, _Definition] = {}

    def snapshot(self, files: Sequence[tuple[str, bytes]], version: int) -> Snapshot:
        empty = bool(files)
        try:
            for file, data in files:
                for tree in documents(file, data, self._faults):
                    empty = False
                    self._document(file, tree, self._faults)
            self._check_fallbacks()
            if empty and not self._faults.errors:
                self._faults.add(PolicyError(files[0][0], 0, "$", "no policy: there is no document here"))
        except TooManyFaults:
            pass
        if errors := self._faults.errors:
            order = {file: index for index, (file, _) in enumerate(files)}
            raise PolicyErrors(sorted(errors, key=lambda error: (order[error.file], error.line)))
        mesh = tuple(self._mesh.values())
        warnings: list[str] = []
        services = tuple(
            with_mesh(service, mesh)
            for service in with_mesh_fallbacks(
                [self._with_known_fallback(service, warnings) for service in self._services.values()], mesh
            )
        )
        snapshot = Snapshot(
            version=version,
            services=services,
            identity=self._identity,
            qos_policies=tuple(self._qos.values()),
            quotas=tuple(self._quotas.values()),
            ready_when=self._ready_when,
            mesh_breakers=mesh,
        )
        _warn(snapshot, warnings.append)
        for name, rule in self._mesh.items():
            where = f"CircuitBreakerPolicy {name}: there is no service"
            if rule.fallback_service and rule.fallback_service not in self._services:
                warnings.append(f"{where} {rule.fallback_service} to fall back to")
            unknown = [each for each in rule.services if each not in self._services]
            if unknown:
                warnings.append(f"{where} {', '.join(unknown)}; it holds once a routing table makes one")
        return replace(snapshot, warnings=tuple(warnings))

    def _document(self, file: str, tree: Node, faults: Faults) -> None:
        reader = Reader(file, faults)
        kind = _kind(tree)
        match kind:
            case "Policy":
                self._policy(file, tree, faults)
                return
            case "CircuitBreakerPolicy":
                self._mesh_breaker(file, tree, faults)
                return
            case "LLMService":
                self._llm_service(file, tree, faults)
                return
            case "TokenQuota":
                self._token_quota(file, tree, faults)
                return
            case "List":
                self._list(file, tree, faults)
                return
            case None:
                reader.error(tree.line, "$", "expected a mapping with apiVersion and kind")
            case "":
                reader.error(tree.line, "$.kind", f"expected one of {KINDS}")
            case _:
                reader.error(line_of(tree, "kind"), "$.kind", f"expected one of {KINDS}, got {quote(kind)}")

    def _list(self, file: str, tree: Node, faults: Faults) -> None:
        """What `kubectl get -o yaml` writes of several objects; a list within a list is none."""
        reader = Reader(file, faults)
        reader.fields(tree, ListDocument)
        entry = tree.entries.get("items") if isinstance(tree, MapNode) else None
        if entry is None or not isinstance(entry[1], ListNode):
            reader.error(line_of(tree, "items"), "$.items", "expected a list")
            return
        for index, item in enumerate(entry[1].items):
            if _kind(item) == "List":
                reader.error(item.line, f"$.items[{index}].kind", f"expected one of {KINDS}, got List")
            else:
                self._document(file, item, Within(faults, f"$.items[{index}]"))

    def _policy(self, file: str, tree: Node, faults: Faults) -> None:
        reader = Reader(file, faults)
        values = reader.fields(tree, PolicyDocument)
        # A wrong apiVersion is told, and the rest judged all the same.
        policy = PolicyDocument(**{"api_version": "sidecar/v1", "kind": "Policy", **values})
        judge = _Judge(file, tree, reader, faults)
        for index, service in enumerate(policy.services):
            at: tuple[Step, ...] = ("services", index)
            if self._define(f"service {service.name}", judge, at, "name"):
                self._services[service.name] = service
            judge.faults(check_service(service), at)
        if "identity" in values and self._define("identity", judge, ("identity",)):
            self._identity = policy.identity
            judge.faults(check_identity(policy.identity))
        for index, qos in enumerate(policy.qos_policies):
            at = ("qos_policies", index)
            if self._define(f"qos policy {qos.name}", judge, at, "name"):
                self._qos[qos.name] = qos
            judge.faults(check_class(qos), at)
        for index, quota in enumerate(policy.quotas):
            at = ("quotas", index)
            if self._define(f"quota {quota.name}", judge, at, "name"):
                self._quotas[quota.name] = quota
            judge.faults(check_quota(quota), at)
        if "ready_when" in values and self._define("ready_when", judge, ("ready_when",)):
            self._ready_when = policy.ready_when

    def _mesh_breaker(self, file: str, tree: Node, faults: Faults) -> None:
        values, judge = self._resource(file, tree, MeshBreakerDocument, faults)
        if values is None:
            return
        rule = MeshBreakerDocument(api_version="resilience.example.com/v1", kind="CircuitBreakerPolicy", **values).spec
        name: str = values["metadata"].name
        judge.faults(check_breaker(rule), ("spec",))
        if not self._define(f"CircuitBreakerPolicy {name}", judge, ("metadata", "name")):
            return
        self._mesh[name] = rule
        if not rule.services:
            self._define(f"the CircuitBreakerPolicy for scope {rule.scope}", judge, ("spec", "scope"))
        for index, service in enumerate(rule.services):
            what = f"the CircuitBreakerPolicy of service {service} for scope {rule.scope}"
            self._define(what, judge, ("spec", "services", index))

    def _llm_service(self, file: str, tree: Node, faults: Faults) -> None:
        values, judge = self._resource(file, tree, LlmServiceDocument, faults)
        if values is None:
            return
        document = LlmServiceDocument(api_version="infra.ai/v1", kind="LLMService", **values)
        judge.faults(check_llm_service(document.spec), ("spec",))
        service = service_of(document)
        if self._define(f"service {service.name}", judge, ("metadata", "name"), fallback=("spec", "fallbackService")):
            self._services[service.name] = service

    def _token_quota(self, file: str, tree: Node, faults: Faults) -> None:
        values, judge = self._resource(file, tree, TokenQuotaDocument, faults)
        if values is None:
            return
        document = TokenQuotaDocument(api_version="infra.ai/v1", kind="TokenQuota", **values)
        judge.faults(check_token_quota(document.spec), ("spec",))
        quota = quota_of(document)
        if self._define(f"quota {quota.name}", judge, ("metadata", "name")):
            self._quotas[quota.name] = quota

    def _resource(
        self, file: str, tree: Node, kind: type[Document], faults: Faults
    ) -> tuple[dict[str, Any] | None, _Judge]:
        """`metadata` and `spec` of a custom resource, as far as they were read; None where one of them was not.

        A wrong apiVersion is told, and the rest judged all the same.
        """
        reader = Reader(file, faults)
        values = reader.fields(tree, kind)
        whole: dict[str, Any] = {name: values[name] for name in ("metadata", "spec") if name in values}
        return whole if len(whole) == 2 else None, _Judge(file, tree, reader, faults)

    def _define(
        self,
        what: str,
        judge: _Judge,
        steps: tuple[Step, ...],
        name: str | None = None,
        fallback: tuple[Step, ...] | None = None,
    ) -> bool:
        """Whether `what` is defined for the first time. `fallback`: where it says its own, if not beside its name."""
        definition = _Definition(judge, steps, (*steps, "fallback") if fallback is None else fallback)
        first = self._defined.setdefault(what, definition)
        if first is definition:
            return True
        judge.fault(steps if name is None else (*steps, name), f"{what} is defined already, at {first}")
        return False

    def _check_fallbacks(self) -> None:
        for name, message in check_fallbacks(self._services):
            definition = self._defined[f"service {name}"]
            definition.judge.fault(definition.fallback, message)

    def _with_known_fallback(self, service: Service, warnings: list[str]) -> Service:
        if not service.fallback or service.fallback in self._services:
            return service
        warnings.append(f"service {service.name}: there is no service {service.fallback} to fall back to")
        return replace(service, fallback="")


def _warn(snapshot: Snapshot, add: Callable[[str], None]) -> None:
    warnings_of(snapshot.services, add)
    qos_warnings_of(snapshot.services, snapshot.identity, snapshot.qos_policies, snapshot.quotas, add)


def _kind(tree: Node) -> str | None:
    """What the document says it is: empty if it does not say, None if it is no mapping."""
    if not isinstance(tree, MapNode):
        return None
    entry = tree.entries.get("kind")
    return entry[1].value if entry is not None and isinstance(entry[1], Scalar) else ""


def _prefixes(path: str) -> Iterator[str]:
    """`path` and the paths that lead to it."""
    for index, char in enumerate(path):
        if char in ".[":
            yield path[:index]
    yield path
