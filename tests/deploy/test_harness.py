"""The checks themselves: each is shown something that it must refuse. One that cannot fail is no check."""

import copy
from pathlib import Path

import pytest
import yaml

from tests.deploy import crds, kubernetes
from tests.deploy.objects import Object, kustomize, read, seconds

SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a"},
    "spec": {"selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": 9400}]},
}

RULE: Object = {
    "apiVersion": "networking.istio.io/v1",
    "kind": "DestinationRule",
    "metadata": {"name": "a"},
    "spec": {"host": "a", "trafficPolicy": {"connectionPool": {"tcp": {"connectTimeout": "1s"}}}},
}


def test_releases_go_from_native_sidecars_to_the_newest() -> None:
    assert kubernetes.RELEASES[0] == "1.29"
    assert {"1.30", "1.31", "1.32", "1.33"} < set(kubernetes.RELEASES)


@pytest.mark.parametrize("release", kubernetes.RELEASES)
def test_an_object_of_kubernetes_is_taken_and_its_faults_are_not(release: str) -> None:
    assert kubernetes.faults(SERVICE, release) == []
    typo = copy.deepcopy(SERVICE)
    typo["spec"]["ports"][0]["targetport"] = 9400
    assert any("targetport" in each for each in kubernetes.faults(typo, release))
    wrong = copy.deepcopy(SERVICE)
    wrong["spec"]["ports"][0]["port"] = "eighty"
    assert any("$.spec.ports[0].port" in each for each in kubernetes.faults(wrong, release))


def test_a_kind_that_a_release_lacks_is_refused() -> None:
    assert kubernetes.faults({**SERVICE, "kind": "Servise"}, "1.33") == [
        "Servise/a: Kubernetes 1.33 has no Servise of v1"
    ]


def test_istio_objects_are_held_to_their_fields() -> None:
    assert crds.istio().faults(RULE) == []
    typo = copy.deepcopy(RULE)
    typo["spec"]["trafficPolicy"]["connectionPool"]["tcp"]["connectTimout"] = "1s"
    assert any("connectTimout" in each for each in crds.istio().faults(typo))
    kind = copy.deepcopy(RULE)
    kind["spec"]["host"] = 5
    assert any("$.spec.host" in each for each in crds.istio().faults(kind))


def test_istio_objects_are_held_to_their_cel() -> None:
    short = copy.deepcopy(RULE)
    short["spec"]["trafficPolicy"]["connectionPool"]["tcp"]["connectTimeout"] = "0s"
    assert any("1ms" in each for each in crds.istio().faults(short))
    timeout: Object = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "VirtualService",
        "metadata": {"name": "a"},
        "spec": {"hosts": ["a"], "http": [{"timeout": "0s", "route": [{"destination": {"host": "a"}}]}]},
    }
    assert any("$.spec.http[0].timeout" in each for each in crds.istio().faults(timeout))
    keys: Object = {
        "apiVersion": "security.istio.io/v1",
        "kind": "RequestAuthentication",
        "metadata": {"name": "a"},
        "spec": {"jwtRules": [{"issuer": "a", "jwksUri": "ftp://a/keys"}]},
    }
    assert any("jwksUri" in each for each in crds.istio().faults(keys))


def test_all_of_istios_rules_can_be_evaluated() -> None:
    """Functions that are missing would be found only by the object that has the field."""
    rules: set[str] = set()

    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            rules.update(each["rule"] for each in schema.get("x-kubernetes-validations", []))
            for each in schema.values():
                walk(each)
        elif isinstance(schema, list):
            for each in schema:
                walk(each)

    for definition in read(crds.istio_path().read_text(encoding="utf-8")):
        walk(definition)
    assert len(rules) > 30
    unknown = crds.unknown_functions(rules)
    assert unknown == set()
    assert crds.unknown_functions(["quantity(self) > 1"]) == {"quantity"}


def test_without_istios_crds_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ISTIO_CRDS", str(tmp_path / "none.yaml"))
    with pytest.raises(AssertionError, match=r"github\.com/istio/istio"):
        crds.istio_path()


def test_without_kubectl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match=r"kubernetes\.io/docs/tasks/tools"):
        kustomize(tmp_path)


def test_what_kustomize_refuses_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [none.yaml]\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"none\.yaml"):
        kustomize(tmp_path)


DEFINITION = """\
spec:
  group: example.com
  names: {kind: Thing}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties:
                size: {type: integer, default: 3}
                most: {type: integer, nullable: true}
                port: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
                named: {type: object, additionalProperties: {type: object, properties: {a: {type: string}}}}
              x-kubernetes-validations:
                - {rule: "self.size < 5", message: size is below 5}
                - {rule: "self.size >= oldSelf.size", messageExpression: "'size was ' + string(oldSelf.size)"}
              oneOf: [{required: [size]}]
"""


def test_a_crd_is_read_as_an_api_server_reads_it() -> None:
    things = crds.Crds(read(DEFINITION))

    def faults(spec: Object, old: Object | None = None) -> list[str]:
        before = None if old is None else {"apiVersion": "example.com/v1", "kind": "Thing", "spec": old}
        return things.faults({"apiVersion": "example.com/v1", "kind": "Thing", "spec": spec}, before)

    assert faults({}) == []  # the default makes what oneOf requires
    assert faults({"size": 4, "most": None, "port": "http", "free": {"x": 1}, "named": {"x": {"a": "b"}}}) == []
    assert faults({"size": 9}) == ["Thing/None: $.spec: size is below 5"]
    assert faults({"size": 1}, {}) == ["Thing/None: $.spec: size was 3"]
    assert len(faults({"sise": 1})) == 1
    assert len(faults({"named": {"x": {"b": "a"}}})) == 1
    assert len(faults({"port": 1.5})) == 1
    assert len(faults({"size": None})) == 1


def test_a_repeated_key_is_an_error() -> None:
    with pytest.raises(yaml.YAMLError, match="there twice"):
        read("a: 1\na: 2\n")


def test_durations() -> None:
    assert [seconds(each) for each in ("600s", "10m", "1h30m", "250ms")] == [600, 600, 5400, 0.25]
    with pytest.raises(AssertionError):
        seconds("10")
