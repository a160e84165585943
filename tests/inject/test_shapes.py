"""A view of a pod sees what is there, and takes what is not for nothing."""

import msgspec
import pytest

from sidecar.inject.shapes import Pod


def test_what_is_missing_or_null_is_nothing() -> None:
    for given in ({}, {"metadata": None}, {"metadata": {"labels": None, "annotations": None}, "spec": None}):
        pod = msgspec.convert(given, Pod)
        assert (pod.labels, pod.annotations, pod.spec) == ({}, {}, None)


def test_names_are_those_of_the_api_and_what_is_not_named_is_not_seen() -> None:
    given = {
        "metadata": {"labels": {"a": "b"}, "ownerReferences": [7]},
        "spec": {
            "terminationGracePeriodSeconds": 7,
            "tolerations": "anything",
            "containers": [{"name": "c", "livenessProbe": {"httpGet": {"port": "http", "httpHeaders": []}}}],
        },
    }
    pod = msgspec.convert(given, Pod)
    assert pod.labels == {"a": "b"} and pod.spec is not None and pod.spec.termination_grace_period_seconds == 7
    assert pod.spec.containers is not None
    probe = pod.spec.containers[0].liveness_probe
    assert probe is not None and probe.http_get is not None and probe.http_get.port == "http"


def test_what_has_another_shape_is_told_with_its_path() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.spec\.containers\[0\]\.ports\[0\]\.containerPort"):
        msgspec.convert({"spec": {"containers": [{"name": "c", "ports": [{"containerPort": "80"}]}]}}, Pod)
