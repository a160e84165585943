"""The pod with the sidecar in it: what is added, what is changed, what stands in the way."""

from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from sidecar.inject.container import Sidecar, container, engine_mount, engine_pre_stop, volumes
from sidecar.inject.names import STATUS
from sidecar.inject.pod import (
    MAX_DRAIN_S,
    Declined,
    Defaults,
    Injected,
    Problem,
    Refused,
    Restored,
    guaranteed,
    inject,
    uninject,
)
from sidecar.inject.shapes import Spec
from sidecar.policy.duration import parse_seconds, parse_span
from tests.inject.pods import pods

Object = dict[str, Any]
USUAL = Defaults()


def pod(
    *, engine: Object | None = None, annotations: Object | None = None, labels: Object | None = None, **spec: Any
) -> Object:
    first = {"name": "vllm", "image": "vllm/vllm-openai:v1", "args": ["--model", "m"], **(engine or {})}
    others = spec.pop("others", [])
    return {
        "metadata": {"annotations": annotations or {}, "labels": labels or {}},
        "spec": {"containers": [first, *others], **spec},
    }


def injected(given: Object, defaults: Defaults = USUAL) -> Injected:
    outcome = inject(given, defaults)
    assert isinstance(outcome, Injected), outcome
    return outcome


def test_what_is_added_is_the_block_and_what_belongs_to_it() -> None:
    given = pod()
    untouched = deepcopy(given)
    spec = injected(given).pod["spec"]
    sidecar = Sidecar()
    assert spec["initContainers"] == [container(sidecar)]
    assert spec["volumes"] == volumes(sidecar)
    (engine,) = spec["containers"]
    assert engine["lifecycle"] == {"preStop": engine_pre_stop(sidecar)}
    assert engine["volumeMounts"] == [engine_mount()]
    assert engine["args"] == ["--model", "m", "--host", "127.0.0.1"]
    assert spec["terminationGracePeriodSeconds"] == sidecar.grace_s == 640
    assert given == untouched
    assert set(spec) == {"containers", "initContainers", "volumes", "terminationGracePeriodSeconds"}, "nothing else"


@settings(deadline=None)
@given(pods())
def test_any_pod_comes_back_and_twice_is_once(given: Object) -> None:
    outcome = inject(given, Defaults())
    if isinstance(outcome, Injected):
        assert inject(outcome.pod, Defaults()) == outcome
        assert uninject(outcome.pod) == Restored(given)
        newer = inject(outcome.pod, Defaults(version="9", image="llm-sidecar:9"))
        assert newer == inject(given, Defaults(version="9", image="llm-sidecar:9"))


@pytest.mark.parametrize(
    ("first", "place"),
    [
        (["istio-init", "istio-proxy", "mine"], 2),
        (["istio-validation", "istio-proxy"], 2),
        (["mine"], 0),
        ([], 0),
        (["mine", "istio-init", "other"], 2),
    ],
)
def test_it_starts_behind_the_mesh_and_before_the_user_s_own(first: list[str], place: int) -> None:
    spec = injected(pod(initContainers=[{"name": name} for name in first])).pod["spec"]
    names = [each["name"] for each in spec["initContainers"]]
    assert names[place] == "llm-sidecar" and [*names[:place], *names[place + 1 :]] == first


def problems(given: Any) -> list[str]:
    outcome = inject(given, Defaults())
    assert isinstance(outcome, Refused), outcome
    return [str(each) for each in outcome.problems]


ISTIO = {"name": "istio-proxy", "image": "istio/proxyv2"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "spec.containers: there is no container"),
        ({"spec": {"containers": None}}, "spec.containers: there is no container"),
        ({"spec": {"containers": {}}}, "spec.containers: Expected `array | null`"),
        ({"spec": [], "metadata": 7}, "spec: Expected `object | null`"),
        ({"metadata": [], "spec": {"containers": []}}, "metadata: Expected `object | null`"),
        (pod(annotations={STATUS: "?"}), f"metadata.annotations.{STATUS}: is not what"),
        (pod(labels={"sidecar.infra.ai/inject": "true"}), 'inject is "true", not enabled or disabled'),
        (
            pod(engine={"ports": [{"containerPort": 9401}]}),
            "spec.containers[0].ports[0]: port 9401 is the sidecar's (http-admin)",
        ),
        (
            pod(engine={"ports": [{"containerPort": 9400, "hostPort": 9400, "protocol": "TCP"}]}, hostNetwork=True),
            "port 9400 is the sidecar's (http-llm)",
        ),
        (pod(os={"name": "windows"}), "spec: the pod is for Windows"),
        (pod(nodeSelector={"kubernetes.io/os": "windows"}), "spec: the pod is for Windows"),
        (
            pod(annotations={"sidecar.infra.ai/drain-seconds": "3591"}),
            '"3591" is not a number of seconds from 1 to 3590',
        ),
        (pod(others=[{"name": "o", "ports": [{"containerPort": 9402}]}]), "spec.containers[1].ports[0]: port 9402"),
        (
            pod(initContainers=[{"name": "o", "ports": [{"containerPort": 9400}]}]),
            "spec.initContainers[0].ports[0]: port 9400",
        ),
        (pod(engine={"ports": [{"containerPort": 1, "name": "http-llm"}]}), 'name "http-llm" is the sidecar\'s'),
        (pod(engine={"args": ["--port", "9400"]}), "spec.containers[0]: the engine's port 9400 is the sidecar's"),
        (
            pod(initContainers=[{"name": "llm-sidecar"}]),
            'has the name "llm-sidecar" and was not put there',
        ),
        (
            pod(volumes=[{"name": "a"}, {"name": "llm-sidecar-policy"}]),
            'spec.volumes[1]: the volume\'s name "llm-sidecar-policy"',
        ),
        (
            pod(engine={"volumeMounts": [{"name": "x", "mountPath": "/run/llm-sidecar/"}]}),
            "spec.containers[0].volumeMounts[0]: the sidecar's socket",
        ),
        (pod(securityContext={"runAsUser": 1337}), "spec.securityContext.runAsUser: 1337 is istio-proxy's"),
        (pod(engine={"securityContext": {"runAsGroup": 1337}}), "spec.containers[0].securityContext.runAsGroup: 1337"),
        (pod(others=[ISTIO]), "metadata.annotations: istio-proxy is an ordinary container here"),
        (pod(annotations={"sidecar.istio.io/nativeSidecar": "false"}), "istio-proxy is an ordinary container here"),
        (
            pod(annotations={"inject.istio.io/templates": "sidecar, llm-sidecar"}),
            'Istio\'s template "llm-sidecar" adds the sidecar already',
        ),
        (pod(annotations={"sidecar.infra.ai/drain-seconds": "10m"}), '"10m" is not a number of seconds'),
        (pod(annotations={"sidecar.infra.ai/drain-seconds": "0"}), '"0" is not a number of seconds'),
        (
            pod(annotations={"sidecar.infra.ai/memory": "lots"}),
            'annotations.sidecar.infra.ai/memory: "lots" is no quantity',
        ),
        (pod(annotations={"sidecar.infra.ai/policy": "A b"}), '"A b" is no name of a ConfigMap'),
        (
            pod(engine={"readinessProbe": {"httpGet": {"port": "http"}}}),
            'spec.containers[0].readinessProbe: no port of container "vllm" has the name "http"',
        ),
        (
            pod(engine={"lifecycle": {"preStop": {"httpGet": {"port": "x"}}}}),
            "spec.containers[0].lifecycle.preStop: no port",
        ),
    ],
)
def test_what_stands_in_the_way_is_told_with_its_place(given: Any, words: str) -> None:
    assert any(words in each for each in problems(given)), problems(given)


@pytest.mark.parametrize(
    "given",
    [
        pod(others=[ISTIO], annotations={"traffic.sidecar.istio.io/excludeInboundPorts": "15020, 9401"}),
        pod(initContainers=[{**ISTIO, "restartPolicy": "Always", "securityContext": {"runAsUser": 1337}}]),
        pod(securityContext={"runAsUser": 1000, "fsGroup": 1337}),
        pod(engine={"volumeMounts": [{"name": "x", "mountPath": "/run"}]}),
        pod(engine={"ports": [{"containerPort": 9400, "protocol": "UDP"}]}),
        pod(engine={"ports": [{"containerPort": 1, "hostPort": 9400}]}),
        pod(os={"name": "linux"}, nodeSelector={"kubernetes.io/os": "linux"}),
        pod(volumes=None, initContainers=None, engine={"ports": None, "volumeMounts": None, "lifecycle": None}),
    ],
)
def test_what_only_looks_like_it_does_not(given: Object) -> None:
    injected(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (pod(hostNetwork=True), "spec.hostNetwork: the ports 9400, 9401, 9402 are the node's"),
        (pod(shareProcessNamespace=True), "spec.shareProcessNamespace: the engine sees the sidecar's process"),
        (pod(resources={"requests": {"cpu": "8"}}), "spec.resources: what the sidecar asks for is of the pod's own"),
        (pod(hostPID=True), "spec.hostPID: the engine sees the sidecar's process"),
        (pod(securityContext={"runAsUser": 65532}), "spec.containers[0].securityContext.runAsUser: user 65532"),
        (
            pod(engine={"securityContext": {"runAsUser": 65532}}, securityContext={"runAsUser": 1000}),
            "user 65532 is the sidecar's",
        ),
        (pod(terminationGracePeriodSeconds=60), "spec.terminationGracePeriodSeconds: raised from 60 to 640"),
        (pod(engine={"args": ["--host", "::"]}), 'spec.containers[0]: engine "vllm" listens at ::'),
        (pod(engine={"image": "tritonserver"}), "spec.containers[0]: the policy must name the engine"),
        (
            pod(engine={"ports": [{"containerPort": 8000, "hostPort": 80}]}),
            "spec.containers[0].ports[0].hostPort: leads to 8000",
        ),
        (
            pod(annotations={"traffic.sidecar.istio.io/excludeInboundPorts": "9400"}),
            "traffic to 9400 does not pass istio-proxy",
        ),
        (
            pod(annotations={"sidecar.istio.io/rewriteAppHTTPProbers": "false"}),
            "with strict mTLS kubelet does not get through to 9401",
        ),
        (
            pod(annotations={"proxy.istio.io/config": "holdApplicationUntilProxyStarts: true"}),
            "is for an ordinary istio-proxy",
        ),
        (pod(annotations={"prometheus.io/port": "8000"}), "port 8000 is on loopback now"),
        (
            pod(annotations={"proxy.istio.io/config": "concurrency: 2"}),
            "its drainDuration: drainDuration: 610s",
        ),
        (pod(annotations={"proxy.istio.io/config": '{"drainDuration": "45s"}'}), "istio-proxy cuts streams"),
        (pod(annotations={"proxy.istio.io/config": "drainDuration: long"}), "istio-proxy cuts streams"),
        (
            pod(others=[ISTIO], annotations={"traffic.sidecar.istio.io/excludeInboundPorts": "9401"}),
            "ends with the engine",
        ),
    ],
)
def test_what_may_surprise_is_a_warning(given: Object, words: str) -> None:
    warnings = [str(each) for each in injected(given).warnings]
    assert any(words in each for each in warnings), warnings


def test_an_ordinary_pod_has_no_warning() -> None:
    assert injected(pod()).warnings == ()
    own = pod(engine={"securityContext": {"runAsUser": 1000}}, securityContext={"runAsUser": 65532})
    assert injected(own).warnings == (), "the container's own word is the nearer one"


@pytest.mark.parametrize(
    ("theirs", "hook", "grace"),
    [
        (None, None, 640),
        (0, None, 640),
        (640, None, 640),
        (3600, None, 3600),
        (300, None, 640),
        (300, {"sleep": {"seconds": 200}}, 910),
        (10, {"exec": {"command": ["x"]}}, 640),
    ],
)
def test_the_grace_is_longer_than_the_drain_and_what_follows(
    theirs: int | None, hook: Object | None, grace: int
) -> None:
    lifecycle = {"lifecycle": {"preStop": hook, "postStart": {"sleep": {"seconds": 1}}}}
    spec = injected(pod(engine=lifecycle, terminationGracePeriodSeconds=theirs)).pod["spec"]
    assert spec["terminationGracePeriodSeconds"] == grace
    assert spec["containers"][0]["lifecycle"]["postStart"] == {"sleep": {"seconds": 1}}


@pytest.mark.parametrize(
    ("theirs", "own", "hung"),
    [(None, None, 30), (0, None, 1), (45, None, 45), (45, 7, 7), (640, None, None), (3600, None, None)],
)
def test_an_engine_that_hangs_has_as_long_to_end_as_it_had(
    theirs: int | None, own: int | None, hung: int | None
) -> None:
    probe = {"httpGet": {"path": "/health", "port": 8000}}
    asked = probe if own is None else {**probe, "terminationGracePeriodSeconds": own}
    probes = {"startupProbe": asked, "livenessProbe": asked, "readinessProbe": probe}
    spec = injected(pod(engine=probes, terminationGracePeriodSeconds=theirs)).pod["spec"]
    (engine,) = spec["containers"]
    for key in ("startupProbe", "livenessProbe"):
        assert engine[key].get("terminationGracePeriodSeconds") == hung
    assert "terminationGracePeriodSeconds" not in engine["readinessProbe"], "Kubernetes takes none there"


def test_the_longest_drain_is_one_that_the_sidecar_takes() -> None:
    ours = injected(pod(annotations={"sidecar.infra.ai/drain-seconds": str(MAX_DRAIN_S)})).pod["spec"]["initContainers"]
    said = {each["name"]: each.get("value") for each in ours[0]["env"]}
    assert parse_seconds(said["SIDECAR_DRAIN"]) == MAX_DRAIN_S
    assert parse_span(ours[0]["lifecycle"]["preStop"]["exec"]["command"][-1]) == MAX_DRAIN_S + 10


def test_annotations_say_more_than_defaults() -> None:
    said = {
        "image": "x:2",
        "policy": "chat",
        "drain-seconds": "60",
        "cpu": "2",
        "cpu-limit": "4",
        "memory": "1Gi",
        "memory-limit": "",
    }
    annotations = {f"sidecar.infra.ai/{key}": value for key, value in said.items()}
    spec = injected(pod(annotations=annotations), Defaults(image="y:1", policy="other", drain_s=9)).pod["spec"]
    ours = spec["initContainers"][0]
    assert ours["image"] == "x:2" and spec["terminationGracePeriodSeconds"] == 100
    assert ours["resources"] == {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "4"}}
    assert spec["volumes"][1]["configMap"]["name"] == "chat"


SURE = {"limits": {"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 1}}


@pytest.mark.parametrize(
    ("needs", "sure"),
    [
        (SURE, True),
        ({**SURE, "requests": {"cpu": "8"}}, True),
        ({**SURE, "requests": {"cpu": 4}}, False),
        ({"limits": {"cpu": 8}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_guaranteed_pod_stays_one(needs: Object | None, sure: bool) -> None:
    given = pod(engine={"resources": needs})
    assert guaranteed(msgspec.convert(given["spec"], Spec)) is sure
    spec = injected(given).pod["spec"]
    ours = spec["initContainers"][0]["resources"]
    assert (ours["limits"] == ours["requests"]) is sure


@pytest.mark.parametrize(
    ("ports", "after"),
    [("8000", "8000,9400"), ("8000,9400", "8000,9400"), ("*", "*"), ("", ""), ("80", "80")],
)
def test_the_mesh_takes_in_our_port_where_it_took_in_the_engine_s(ports: str, after: str) -> None:
    name = "traffic.sidecar.istio.io/includeInboundPorts"
    assert injected(pod(annotations={name: ports})).pod["metadata"]["annotations"][name] == after


@pytest.mark.parametrize(
    ("given", "after"),
    [
        (pod(), "drainDuration: 610s"),
        (pod(hostNetwork=True), None),
        (pod(annotations={"proxy.istio.io/config": "drainDuration: 1h\n"}), "drainDuration: 1h\n"),
        (pod(annotations={"sidecar.infra.ai/drain-seconds": "60"}), "drainDuration: 70s"),
    ],
)
def test_the_mesh_s_proxy_drains_as_long_as_we_do(given: Object, after: str | None) -> None:
    made = injected(given)
    assert made.pod["metadata"]["annotations"].get("proxy.istio.io/config") == after
    assert not any("drainDuration" in str(each) for each in made.warnings)


@pytest.mark.parametrize(
    ("given", "after"),
    [
        (pod(), "true"),
        (pod(hostNetwork=True), None),
        (pod(annotations={"sidecar.istio.io/nativeSidecar": "true"}), "true"),
        (
            pod(
                annotations={
                    "sidecar.istio.io/nativeSidecar": "false",
                    "traffic.sidecar.istio.io/excludeInboundPorts": "9401",
                }
            ),
            "false",
        ),
        (pod(others=[ISTIO], annotations={"traffic.sidecar.istio.io/excludeInboundPorts": "9401"}), None),
    ],
)
def test_the_mesh_s_proxy_is_asked_to_be_there_before_us(given: Object, after: str | None) -> None:
    assert injected(given).pod["metadata"]["annotations"].get("sidecar.istio.io/nativeSidecar") == after


def test_who_does_not_want_it_and_who_did_not_ask_stay() -> None:
    assert inject(pod(labels={"sidecar.infra.ai/inject": "disabled"}), Defaults()) == Declined(
        Problem("metadata.labels", "sidecar.infra.ai/inject is disabled"), wished=True
    )
    other = pod(engine={"image": "redis", "args": []})
    outcome = inject(other, Defaults())
    assert isinstance(outcome, Declined) and not outcome.wished
    asked = pod(engine={"image": "redis", "args": []}, labels={"sidecar.infra.ai/inject": "enabled"})
    assert "no container looks like an engine" in problems(asked)[0]
    assert uninject(other) is None
