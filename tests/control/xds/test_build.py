"""A service in Envoy's words."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.control.xds import protos
from sidecar.control.xds.build import Where, build, layout, listener
from sidecar.control.xds.snapshot import Part
from sidecar.core.table import PARTS, Decay, Plan, Rollout, Step, Table, Target, Version, effective, weighed
from sidecar.policy.schema import Balance, Deadlines, Retry, Seconds, Service
from tests.control.xds.desk import at, service, table

A, B, C = "http://127.0.0.1:8001", "http://127.0.0.1:8002", "http://127.0.0.1:8003"


def made(files: Service, over: Table | None = None) -> Part:
    return build(files if over is None else effective(files, over), over, 1, lambda name: f"PEM of {name}")


def clusters(part: Part) -> dict[str, Any]:
    return {each.name: protos.Cluster.FromString(each.body) for each in part.clusters}


def assignments(part: Part) -> dict[str, Any]:
    return {each.name: protos.ClusterLoadAssignment.FromString(each.body) for each in part.assignments}


def action(part: Part) -> Any:
    (route,) = protos.VirtualHost.FromString(part.host).routes
    return route


def weights(part: Part) -> list[tuple[str, int]]:
    found = action(part).route.weighted_clusters
    assert found.use_hash_policy.value
    assert not found.clusters or sum(each.weight.value for each in found.clusters) == PARTS
    return [(each.name, each.weight.value) for each in found.clusters]


def test_a_version_is_a_cluster_and_its_part_a_weight() -> None:
    part = made(service("chat"), table("chat", v1=(8500, (A,)), v2=(1500, (B, C))))
    assert list(clusters(part)) == list(assignments(part)) == ["chat|v1", "chat|v2"]
    assert weights(part) == [("chat|v1", 8500), ("chat|v2", 1500)]
    assert len(assignments(part)["chat|v2"].endpoints[0].lb_endpoints) == 2


def test_the_answer_says_its_version() -> None:
    part = made(service("chat"), table("chat", v1=(10_000, (A,))))
    (added,) = action(part).route.weighted_clusters.clusters[0].response_headers_to_add
    assert (added.header.key, added.header.value) == ("x-sidecar-version", "v1")


def test_without_a_split_a_version_has_the_share_of_its_endpoints() -> None:
    assert weights(made(service("chat", at(A), at(B), at(C, "v2")))) == [("chat|v1", 6667), ("chat|v2", 3333)]


def test_a_version_without_weight_keeps_its_cluster() -> None:
    part = made(service("chat"), table("chat", v1=(10_000, (A,)), v2=(0, (B,))))
    assert list(clusters(part)) == ["chat|v1", "chat|v2"]
    assert weights(part) == [("chat|v1", 10_000)]


def test_a_version_without_endpoints_gives_its_share_to_the_others() -> None:
    part = made(service("chat"), table("chat", v1=(4000, (A,)), v2=(4000, (B,)), v3=(2000, ())))
    assert weights(part) == [("chat|v1", 5000), ("chat|v2", 5000)]


@pytest.mark.parametrize(
    "over",
    [
        pytest.param(table("chat", v1=(0, (A,)), v2=(0, (B,))), id="no weight"),
        pytest.param(table("chat", v1=(10_000, ())), id="no endpoint"),
    ],
)
def test_where_nobody_gets_anything_all_are_refused(over: Table) -> None:
    refusal = action(made(service("chat"), over)).direct_response
    assert refusal.status == 503
    assert "chat" in refusal.body.inline_string


def test_a_service_without_versions_is_not_routed() -> None:
    part = made(service("chat"), Table("chat"))
    assert (part.host, part.clusters, part.assignments) == (b"", (), ())


def test_an_endpoint_without_models_gets_nothing() -> None:
    assert weights(made(service("chat", at(A), at(B, "v2", models=())))) == [("chat|v1", 10_000)]


# Who needs a sidecar.


def speaking(name: str, part: int, engine: Any, front: Any, *urls: str) -> Version:
    return Version(name, part, engine, tuple(Target(url) for url in urls), front=front)


V1 = speaking("v1", 6000, "vllm", "", A)
LEAVES = "which no Envoy can translate"


def test_a_version_that_is_translated_has_no_cluster_and_its_share_is_the_others() -> None:
    mii, triton = speaking("v2", 1000, "deepspeed", "gateway", B), speaking("v3", 3000, "triton", "", C)
    part = made(service("chat"), Table("chat", (V1, mii, triton)))
    assert list(clusters(part)) == list(assignments(part)) == ["chat|v1"]
    assert weights(part) == [("chat|v1", 10_000)]
    others = "% are the others', which have v1 100.00%"
    assert part.notices == (
        f"version v2: 1 of 1 endpoints speak deepspeed/gateway, {LEAVES}: its 10.00{others}",
        f"version v3: 1 of 1 endpoints speak triton/generate, {LEAVES}: its 30.00{others}",
    )
    assert part.left_out == ()


def test_the_rest_keep_their_proportions() -> None:
    over = Table("chat", (V1, speaking("v2", 2000, "vllm", "", B), speaking("v3", 2000, "triton", "", C)))
    part = made(service("chat"), over)
    assert weights(part) == [("chat|v1", 7500), ("chat|v2", 2500)]
    assert part.notices[0].endswith("its 20.00% are the others', which have v1 75.00%, v2 25.00%")


def test_tritons_openai_front_needs_nobody() -> None:
    part = made(service("chat"), Table("chat", (V1, speaking("v2", 4000, "triton", "openai", B))))
    assert weights(part) == [("chat|v1", 6000), ("chat|v2", 4000)]
    assert (part.notices, part.untold) == ((), ())


def test_a_version_with_other_endpoints_beside_them_keeps_its_share() -> None:
    files = service(
        "chat", at(A), at(B, "v2"), at(C, "v2", engine="triton"), at("http://127.0.0.1:8004", "v2", engine="deepspeed")
    )
    part = made(replace(files, split={"v1": 0.5, "v2": 0.5}))
    assert weights(part) == [("chat|v1", 5000), ("chat|v2", 5000)]
    (place,) = assignments(part)["chat|v2"].endpoints[0].lb_endpoints
    assert place.endpoint.address.socket_address.port_value == 8002
    assert part.notices == (
        "version v2: 2 of 3 endpoints speak deepspeed/openai, triton/generate, "
        f"{LEAVES}: the others of it have its 50.00%",
    )
    # Without a split any endpoint serves: those that Envoys know.
    assert weights(made(files)) == [("chat|v1", 5000), ("chat|v2", 5000)]
    assert made(files).notices[0].endswith("the others of it have its 75.00%")


def test_where_only_a_sidecar_can_ask_all_are_refused_with_the_reason() -> None:
    part = made(service("chat"), Table("chat", (speaking("v1", 10_000, "triton", "", A),)))
    assert (part.clusters, part.assignments) == ((), ())
    refusal = action(part).direct_response
    assert (refusal.status, "without a sidecar" in refusal.body.inline_string) == (503, True)
    assert part.notices[0].endswith("nobody is left for its 100.00%, and Envoys answer 503")


def test_a_version_without_weight_is_told_too_and_new_weights_are_new_words() -> None:
    over = Table("chat", (replace(V1, weight=10_000), speaking("v2", 0, "triton", "", B)))
    first = made(service("chat"), over)
    assert first.notices[0].endswith("it has no weight now")
    later = replace(over, versions=(V1, replace(over.versions[1], weight=4000)))
    part = build(effective(service("chat"), later), later, 2, lambda name: name, first)
    assert part.notices[0].endswith("its 40.00% are the others', which have v1 100.00%")
    assert part.clusters is first.clusters and part.fingerprint == first.fingerprint


def test_a_front_that_changes_makes_the_cluster() -> None:
    over = Table("chat", (V1, speaking("v2", 4000, "triton", "", B)))
    first = made(service("chat"), over)
    later = replace(over, versions=(V1, replace(over.versions[1], front="openai")))
    part = build(effective(service("chat"), later), later, 2, lambda name: name, first)
    assert list(clusters(part)) == ["chat|v1", "chat|v2"]
    assert part.notices == ()


def test_streams_have_no_end_but_silence() -> None:
    deadlines = Deadlines(first_token_s=Seconds(45), head_s=Seconds(20), connect_s=Seconds(0.25))
    part = made(service("chat", at(A), deadlines=deadlines))
    route = action(part).route
    assert (route.HasField("timeout"), route.timeout.ToNanoseconds()) == (True, 0)
    assert route.idle_timeout.ToNanoseconds() == 45_000_000_000
    assert clusters(part)["chat|v1"].connect_timeout.ToNanoseconds() == 250_000_000


def test_what_was_not_sent_is_sent_elsewhere_as_often_as_the_policy_says() -> None:
    retry = action(made(service("chat", at(A), retry=Retry(attempts=4)))).route.retry_policy
    assert retry.num_retries.value == 3
    assert set(retry.retry_on.split(",")) == {"connect-failure", "refused-stream", "reset-before-request"}
    assert not action(made(service("chat", at(A), retry=Retry(attempts=1)))).route.HasField("retry_policy")


def test_sessions_choose_by_their_header() -> None:
    (policy,) = action(made(service("chat", at(A)))).route.hash_policy
    assert policy.header.header_name == "x-session-id"


@pytest.mark.parametrize(("affinity", "policy"), [("prefer", "RING_HASH"), ("off", "LEAST_REQUEST")])
def test_sessions_stay_on_endpoints_as_the_policy_says(affinity: Any, policy: str) -> None:
    cluster = clusters(made(service("chat", at(A), balance=Balance(affinity=affinity))))["chat|v1"]
    assert cluster.lb_policy == protos.Cluster.LbPolicy.Value(policy)


def test_a_socket_is_a_pipe() -> None:
    part = made(service("chat", at("unix:///run/vllm.sock")))
    (endpoint,) = assignments(part)["chat|v1"].endpoints[0].lb_endpoints
    assert endpoint.endpoint.address.pipe.path == "/run/vllm.sock"


def test_a_version_with_a_name_is_resolved_by_the_envoy() -> None:
    part = made(service("chat", at("http://vllm-0.vllm:8000"), at(A), at(B, "v2")))
    assert list(assignments(part)) == ["chat|v2"]
    cluster = clusters(part)["chat|v1"]
    assert cluster.type == protos.Cluster.DiscoveryType.Value("STRICT_DNS")
    hosts = [each.endpoint.hostname for each in cluster.load_assignment.endpoints[0].lb_endpoints]
    assert hosts == ["vllm-0.vllm", "127.0.0.1"]


def test_a_socket_beside_a_name_is_left_out_and_told() -> None:
    part = made(service("chat", at("http://vllm:8000"), at("unix:///run/vllm.sock")))
    assert len(clusters(part)["chat|v1"].load_assignment.endpoints[0].lb_endpoints) == 1
    assert part.left_out[0].startswith("unix:///run/vllm.sock: ")


def tls(part: Part, version: str = "v1") -> dict[str, Any]:
    """By the key that endpoints are matched by."""
    found = {}
    for each in clusters(part)[f"chat|{version}"].transport_socket_matches:
        found[each.match.fields["tls"].string_value] = protos.UpstreamTlsContext.FromString(
            each.transport_socket.typed_config.value
        )
    return found


def matched(part: Part, version: str = "v1") -> list[str]:
    (locality,) = assignments(part)[f"chat|{version}"].endpoints
    name = "envoy.transport_socket_match"
    return [each.metadata.filter_metadata[name].fields["tls"].string_value for each in locality.lb_endpoints]


def test_an_https_address_is_verified_by_the_address() -> None:
    part = made(service("chat", at("https://127.0.0.1:8443", tls_ca="/ca.pem"), at(A)))
    key, plain = matched(part)
    assert plain == ""
    context = tls(part)[key].common_tls_context.validation_context
    assert context.trusted_ca.inline_string == "PEM of /ca.pem"
    (name,) = context.match_typed_subject_alt_names
    assert name.matcher.exact == "127.0.0.1"


def test_an_https_name_is_verified_by_the_name() -> None:
    part = made(service("chat", at("https://engine.example"), at("https://engine-2.example")))
    (context,) = tls(part).values()
    assert context.auto_host_sni
    assert context.auto_sni_san_validation


def test_tls_without_verification_has_no_authority() -> None:
    part = made(service("chat", at("https://127.0.0.1:8443", tls_verify=False)))
    (context,) = tls(part).values()
    assert not context.common_tls_context.HasField("validation_context")


def test_an_authority_that_cannot_be_read_leaves_its_endpoints_out() -> None:
    def unreadable(name: str) -> str:
        raise FileNotFoundError(f"no {name}")

    files = service("chat", at("https://127.0.0.1:8443", tls_ca="/ca.pem"), at(A))
    part = build(files, None, 0, unreadable)
    assert matched(part) == [""]
    assert part.left_out == ("https://127.0.0.1:8443: no /ca.pem",)


def localities(part: Part) -> dict[str, int]:
    return {each.locality.zone: each.load_balancing_weight.value for each in assignments(part)["chat|v1"].endpoints}


ZONED = service("chat", at(A, zone="a"), at(B, zone="a"), at(C, zone="b"))


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        pytest.param({}, {"a": 20_000, "b": 10_000}, id="each by its endpoints"),
        pytest.param({"a": 0.1}, {"a": 2_000, "b": 10_000}, id="turned down"),
        pytest.param({"a": 1.0}, {"a": 20_000, "b": 10_000}, id="back"),
        pytest.param({"a": 0.0}, {"a": 0, "b": 10_000}, id="off"),
        pytest.param({"a": 0.0, "b": 0.0}, {"a": 2, "b": 1}, id="all off"),
        pytest.param({"b": 0.00001}, {"a": 20_000, "b": 1}, id="the least"),
    ],
)
def test_a_zone_has_the_weight_of_its_share(zones: dict[str, float], expected: dict[str, int]) -> None:
    over = Table("chat", zones={zone: Decay(share, 0) for zone, share in zones.items()})
    part = made(ZONED, over)
    assert localities(part) == expected
    assert part.clusters == made(ZONED).clusters


def test_new_weights_make_no_endpoint_anew() -> None:
    over = table("chat", v1=(9000, (A,)), v2=(1000, (B,)))
    before = made(service("chat"), over)
    over = table("chat", v1=(8000, (A,)), v2=(2000, (B,)))
    after = build(effective(service("chat"), over), over, 2, lambda _: "", before)
    assert after.clusters is before.clusters
    assert after.assignments is before.assignments
    assert weights(after) == [("chat|v1", 8000), ("chat|v2", 2000)]
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"endpoints": (at(A), at(B))},
        {"deadlines": Deadlines(connect_s=Seconds(2))},
        {"balance": Balance(affinity="off")},
    ],
    ids=["endpoints", "deadlines", "balance"],
)
def test_what_a_cluster_is_made_from_makes_it_anew(change: dict[str, Any]) -> None:
    files = service("chat", at(A))
    before = made(files)
    changed = replace(files, **change)
    assert build(changed, None, 1, lambda _: "", before).fingerprint == made(changed).fingerprint != before.fingerprint


def test_the_listener_asks_for_the_routes() -> None:
    found = protos.Listener.FromString(listener(Where("0.0.0.0", 10_000)).body)
    assert found.address.socket_address.port_value == 10_000
    (link,) = found.filter_chains[0].filters
    manager = protos.HttpConnectionManager.FromString(link.typed_config.value)
    assert manager.rds.route_config_name == "sidecar"


# The order of the weights.


def chosen(order: list[tuple[str, int]], point: int) -> str:
    """Whom a hash that falls on `point` of the whole belongs to."""
    for name, part in order:
        point -= part
        if point < 0:
            return name
    raise AssertionError("beyond the whole")


def test_the_moving_version_lies_behind_each_other_one() -> None:
    assert layout([("a", 6000), ("b", 2000), ("c", 2000)], "c") == [
        ("a", 6000), ("c", 1500), ("b", 2000), ("c", 500),
    ]  # fmt: skip
    assert layout([("a", 9000), ("b", 1000)], "b") == [("a", 9000), ("b", 1000)]
    assert layout([("a", 0), ("b", 10_000)], "b") == [("b", 10_000)]
    assert layout([("a", 0), ("b", 0)], "b") == []


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.data())
def test_the_order_keeps_the_parts(parts: list[int], data: st.DataObject) -> None:
    named = [(f"v{number}", part) for number, part in enumerate(parts)]
    moving = data.draw(st.sampled_from([name for name, _ in named]))
    order = layout(named, moving)
    assert {name: sum(part for each, part in order if each == name) for name, _ in named} == dict(named)
    assert len(order) <= 2 * len(named)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"v1": 10_000}, id="one"),
        pytest.param({"v1": 5000, "v2": 5000}, id="two"),
        pytest.param({"v1": 4000, "v2": 3500, "v3": 2500}, id="three"),
    ],
)
def test_a_growing_version_takes_and_the_others_keep(others: dict[str, int]) -> None:
    """No session moves but to the version that grows; what rounding moves is a part in 10,000 at a border."""
    over = table("chat", **{name: (part, (A,)) for name, part in others.items()}, new=(0, (B,)))
    orders = []
    for weight in range(0, PARTS + 1, 500):
        weighted = weighed(over, "new", weight)
        assert weighted is not None
        orders.append(layout([(each.name, each.weight) for each in weighted.versions], "new"))
    astray = 0
    for before, after in pairwise(orders):
        for point in range(PARTS):
            one, other = chosen(before, point), chosen(after, point)
            astray += one != other and other != "new"
    assert astray <= 0 if len(others) == 1 else astray <= 2 * len(others) * len(orders)


def test_a_rollout_says_which_version_moves() -> None:
    over = table("chat", v1=(5000, (A,)), v2=(1000, (B,)), v3=(4000, (C,)))
    rollout = Rollout("r1", "v2", Plan("v1", (Step(1000, 1, 1),)))
    assert [name for name, _ in weights(made(service("chat"), over))] == ["chat|v1", "chat|v3", "chat|v2", "chat|v3"]
    over = msgspec.structs.replace(over, rollout=rollout)
    assert [name for name, _ in weights(made(service("chat"), over))] == ["chat|v1", "chat|v2", "chat|v3", "chat|v2"]
