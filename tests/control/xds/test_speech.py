"""The two protocols' messages, in and out."""

import pytest

from sidecar.control.xds import protos
from sidecar.control.xds.snapshot import TYPE_URLS, Kind, Resource, compose
from sidecar.control.xds.speech import NAMES, BadRequest, hear, write
from sidecar.control.xds.walk import Push, Walk

NOTHING = compose([], None)
URL = TYPE_URLS[Kind.CLUSTERS]
PUSH = Push(
    Kind.CLUSTERS, "7", "v", (Resource("a", protos.Cluster(name="a").SerializeToString(), "1"),), ("b",), NOTHING
)


def test_a_push_of_the_world() -> None:
    said = protos.DiscoveryResponse.FromString(write(PUSH, delta=False))
    assert (said.version_info, said.nonce, said.type_url) == ("v", "7", URL)
    (each,) = said.resources
    assert each.type_url == URL
    assert protos.Cluster.FromString(each.value).name == "a"


def test_a_push_of_differences() -> None:
    said = protos.DeltaDiscoveryResponse.FromString(write(PUSH, delta=True))
    assert (said.system_version_info, said.nonce, said.type_url) == ("v", "7", URL)
    (each,) = said.resources
    assert (each.name, each.version) == ("a", "1")
    assert list(said.removed_resources) == ["b"]


def test_who_speaks() -> None:
    walk = Walk(delta=False)
    request = protos.DiscoveryRequest(type_url=URL, node={"id": "envoy-1", "cluster": "edge"})
    assert hear(walk, request.SerializeToString()).node == "edge/envoy-1"
    assert walk.next(NOTHING) is not None


@pytest.mark.parametrize("delta", [False, True])
def test_an_answer_and_a_refusal(delta: bool) -> None:
    made = protos.DeltaDiscoveryRequest if delta else protos.DiscoveryRequest
    walk = Walk(delta)
    assert hear(walk, made(type_url=URL).SerializeToString()).answer is None
    push = walk.next(NOTHING)
    assert push is not None
    refusal = made(type_url=URL, response_nonce=push.nonce, error_detail={"code": 13, "message": "no"})
    answer = hear(walk, refusal.SerializeToString()).answer
    assert answer is not None
    assert answer.error == "no"


def test_a_refusal_without_words_is_one() -> None:
    walk = Walk(delta=False)
    hear(walk, protos.DiscoveryRequest(type_url=URL).SerializeToString())
    push = walk.next(NOTHING)
    assert push is not None
    refusal = protos.DiscoveryRequest(type_url=URL, response_nonce=push.nonce, error_detail={"code": 13})
    answer = hear(walk, refusal.SerializeToString()).answer
    assert answer is not None
    assert answer.error == "code 13"


def test_what_is_held_from_before() -> None:
    walk = Walk(delta=True)
    request = protos.DeltaDiscoveryRequest(
        type_url=URL, resource_names_subscribe=["*"], initial_resource_versions={"a": "1"}
    )
    hear(walk, request.SerializeToString())
    push = walk.next(NOTHING)
    assert push is not None
    assert push.gone == ("a",)


def test_a_kind_that_is_not_served_is_not_answered() -> None:
    walk = Walk(delta=False)
    request = protos.DiscoveryRequest(type_url=protos.TYPE_PREFIX + "envoy.service.runtime.v3.Runtime")
    assert hear(walk, request.SerializeToString()).answer is None
    assert walk.next(NOTHING) is None


@pytest.mark.parametrize("delta", [False, True])
def test_bytes_that_are_no_request(delta: bool) -> None:
    with pytest.raises(BadRequest):
        hear(Walk(delta), b"\xff\xff\xff")


@pytest.mark.parametrize("delta", [False, True])
def test_more_names_than_there_can_be(delta: bool) -> None:
    made, field = (
        (protos.DeltaDiscoveryRequest, "resource_names_subscribe")
        if delta
        else (protos.DiscoveryRequest, "resource_names")
    )

    def ask(walk: Walk, first: int, count: int, field: str = field) -> None:
        names = [f"n{number}" for number in range(first, first + count)]
        hear(walk, made(type_url=URL, **{field: names}).SerializeToString())

    walk = Walk(delta)
    ask(walk, 0, NAMES)
    with pytest.raises(BadRequest):
        ask(walk, 0, NAMES + 1)
    if delta:
        for first in (NAMES, 2 * NAMES):
            ask(walk, first, NAMES, "resource_names_unsubscribe")  # of what it never wanted: nothing is kept
        assert walk.names(Kind.CLUSTERS) == NAMES
        ask(walk, NAMES, NAMES)
        with pytest.raises(BadRequest):
            ask(walk, 2 * NAMES, 1)
