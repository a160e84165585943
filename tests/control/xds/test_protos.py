"""Envoy's messages: what `envoy.pb` holds, and that it stays beside everybody else's Protobuf."""

import pytest
from google.protobuf import descriptor_pool

from sidecar.control.xds import protos


def test_the_methods_of_the_service_are_what_envoy_calls() -> None:
    service = protos._pool.FindServiceByName(protos.SERVICE)
    assert sorted(method.name for method in service.methods) == [
        "DeltaAggregatedResources",
        "StreamAggregatedResources",
    ]


def test_nothing_of_envoy_is_in_the_pool_that_all_share() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("envoy.config.cluster.v3.Cluster")


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        protos.message("envoy.config.cluster.v3.Clusters")


def test_a_packed_message_is_found_again() -> None:
    made = protos.Listener(metadata={}, name="a", address={"pipe": {"path": "/x"}})
    packed = protos.message("google.protobuf.Any")(**protos.packed(made))
    assert packed.type_url == "type.googleapis.com/envoy.config.listener.v3.Listener"
    assert protos.Listener.FromString(packed.value) == made
