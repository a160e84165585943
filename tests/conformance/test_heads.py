"""What of a head crosses the proxy, and how: names, values and targets verbatim, hop-by-hop removed, ours added."""

import pytest

from tests.harness import Message, answers, request, response
from tests.under_test import COMPLETION, chat, json_answer, relayed

ADDED_UP = {b"x-forwarded-for", b"x-forwarded-proto", b"x-request-id"}
ADDED_DOWN = {b"x-request-id", b"x-sidecar-endpoint", b"x-sidecar-version", b"x-sidecar-attempts"}
FRAMING = {b"content-length", b"transfer-encoding"}


def passed(message: Message, added: set[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers without those that the proxy may add or that frame the body."""
    return [(name, value) for name, value in message.headers if name.lower() not in added | FRAMING]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/", id="root"),
        pytest.param(b"/a/../b/./c//d", id="dots-and-slashes"),
        pytest.param(b"/%7Euser/%2e%2E/%2F?x=%20+%00", id="escapes-in-both-cases"),
        pytest.param(b"/x?", id="empty-query"),
        pytest.param(b"/x?a=1&a=2&b", id="query"),
        pytest.param(b"/x??y=?/:@!$'()*,;=", id="reserved-characters"),
        pytest.param(b"/a;p=1/b;q", id="path-parameters"),
        pytest.param(b"/" + b"long/" * 400, id="long"),
    ],
)
async def test_targets_cross_verbatim(target: bytes, split: bool) -> None:
    async with relayed(answers(response(b"ok")), split) as (upstream, _, client):
        assert (await client.ask(request(target))).body == b"ok"
        [sent] = upstream.requests
        assert sent.start == b"GET %b HTTP/1.1" % target


async def test_asterisk_and_absolute_targets_are_relayed(split: bool) -> None:
    async with relayed(answers(response(b"ok")), split) as (upstream, _, client):
        assert (await client.ask(request(b"*", method=b"OPTIONS"), b"OPTIONS")).status == 200
        assert (await client.ask(request(b"http://engine.test/x?y"))).status == 200
        assert upstream.requests[0].target == b"*"
        assert upstream.requests[1].target in (b"http://engine.test/x?y", b"/x?y")


@pytest.mark.parametrize("method", [b"GET", b"DELETE", b"OPTIONS", b"PATCH", b"PUT", b"PROPFIND", b"HEAD"])
async def test_methods_cross(method: bytes, split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        assert (await client.ask(request(method=method), method)).status == 200
        assert upstream.requests[0].method == method


async def test_connect_is_never_tunnelled() -> None:
    async with relayed(answers(response())) as (upstream, _, client):
        await client.send(b"CONNECT engine.test:443 HTTP/1.1\r\nHost: engine.test:443\r\n\r\n\x16\x03\x01")
        assert 400 <= (await client.response()).status < 600
        assert upstream.requests == []


@pytest.mark.parametrize("inference", [False, True], ids=["streamed", "inference"])
async def test_request_headers_cross_in_order_and_verbatim(inference: bool, split: bool) -> None:
    lines = [
        b"User-Agent: curl/8",
        b"ACCEPT: */*",
        b"x-lower: a",
        b"X-Twice: 1",
        b"x-twice: 2",
        b"X-Empty:",
        b"X-Spaces: a  b\tc",
        b"X-Latin: caf\xe9",
        b"X-Utf8: caf\xc3\xa9 \xff",
        b"X-Quoted: \"a;b\", 'c'",
        b"Cookie: a=1; b=2",
        b"Authorization: Bearer abc.def",
        b"Accept-Encoding: gzip, br",
        b"Via: 1.1 their-own",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ]
    sent_bytes = chat(headers=lines, stream=False) if inference else request(headers=lines)
    async with relayed(answers(json_answer(COMPLETION)), split) as (upstream, _, client):
        await client.ask(sent_bytes, b"POST" if inference else b"GET")
        [sent] = upstream.requests
        host = [(b"Host", b"engine.test")]
        typed = [(b"Content-Type", b"application/json")] if inference else []
        pairs = [(line.partition(b":")[0], line.partition(b":")[2].strip(b" ")) for line in lines]
        assert passed(sent, ADDED_UP) == host + typed + pairs


async def test_white_space_around_values_is_no_part_of_them(split: bool) -> None:
    async with relayed(answers(response(headers=[b"X-B: \t b \t"])), split) as (upstream, _, client):
        got = await client.ask(request(headers=[b"X-A: \t a \t"]))
        assert upstream.requests[0].header(b"x-a") == b"a"
        assert got.header(b"x-b") == b"b"


@pytest.mark.parametrize(
    "host", [b"engine.test", b"a.b:8443", b"[::1]:80", b"UPPER.test", b"x_y"], ids=lambda host: host.decode()
)
async def test_host_is_kept(host: bytes, split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        await client.ask(request(host=host))
        assert upstream.requests[0].header(b"host") == host


@pytest.mark.parametrize(
    ("lines", "removed"),
    [
        pytest.param([b"Keep-Alive: timeout=5"], [b"keep-alive"], id="keep-alive"),
        pytest.param([b"Proxy-Connection: keep-alive"], [b"proxy-connection"], id="proxy-connection"),
        pytest.param([b"TE: gzip"], [b"te"], id="te"),
        pytest.param([b"Upgrade: h2c"], [b"upgrade"], id="upgrade-unasked"),
        pytest.param([b"Connection: x-drop", b"X-Drop: 1"], [b"x-drop"], id="named"),
        pytest.param([b"X-Drop: 1", b"Connection: X-DROP"], [b"x-drop"], id="named-after-in-other-case"),
        pytest.param(
            [b"Connection: keep-alive , X-One,,\tx-two ", b"X-One: 1", b"X-Two: 2"], [b"x-one", b"x-two"], id="list"
        ),
        pytest.param(
            [b"Connection: x-one", b"connection: x-two", b"X-One: 1", b"X-Two: 2", b"x-two: 3"],
            [b"x-one", b"x-two"],
            id="two-connection-headers",
        ),
    ],
)
async def test_hop_by_hop_headers_are_removed(lines: list[bytes], removed: list[bytes], split: bool) -> None:
    stay = b"X-Stay: 1"
    async with relayed(answers(response(headers=[*lines, stay])), split) as (upstream, _, client):
        got = await client.ask(request(headers=[*lines, stay]))
        [sent] = upstream.requests
        for message in (sent, got):
            assert message.header(b"x-stay") == b"1"
            for name in removed:
                assert message.values(name) == []
            own = b",".join(message.values(b"connection")).lower()
            assert own in (b"", b"keep-alive"), "a connection header of the other hop"
        again = await client.ask(request(b"/again"))
        assert again.status == 200


@pytest.mark.parametrize("victim", [b"Host", b"Content-Length", b"Transfer-Encoding"], ids=lambda name: name.decode())
async def test_connection_cannot_remove_what_frames_or_routes(victim: bytes, split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        got = await client.ask(request(method=b"PUT", headers=[b"Connection: " + victim], body=b"12345"), b"PUT")
        assert got.status in (200, 400)
        if got.status == 200:
            [sent] = upstream.requests
            assert (sent.header(b"host"), sent.body) == (b"engine.test", b"12345")
        else:
            assert upstream.requests == []


async def test_forwarded_headers_and_a_request_id_are_added(split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        first = await client.ask(request())
        second = await client.ask(request())
        for sent, got in zip(upstream.requests, (first, second), strict=True):
            assert sent.header(b"x-forwarded-for") == b"127.0.0.1"
            assert sent.header(b"x-forwarded-proto") == b"http"
            assert sent.header(b"x-request-id") == got.header(b"x-request-id")
            assert {name.lower() for name, _ in sent.headers} == ADDED_UP | {b"host"}
        assert first.header(b"x-request-id") != second.header(b"x-request-id")


async def test_forwarded_for_is_appended_to(split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        await client.ask(request(headers=[b"X-Forwarded-For: 192.0.2.1, 192.0.2.2"]))
        found = b", ".join(upstream.requests[0].values(b"x-forwarded-for"))
        assert found == b"192.0.2.1, 192.0.2.2, 127.0.0.1"


async def test_request_id_is_kept(split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        got = await client.ask(request(headers=[b"X-Request-Id: Mine-1"]))
        assert upstream.requests[0].header(b"x-request-id") == b"Mine-1"
        assert got.header(b"x-request-id") == b"Mine-1"


@pytest.mark.parametrize("trusted", [False, True], ids=["untrusted", "trusted"])
async def test_sidecar_headers_of_clients_are_stripped_unless_trusted(trusted: bool, split: bool) -> None:
    async with relayed(answers(response()), split, trusted=trusted) as (upstream, _, client):
        await client.ask(request(headers=[b"X-Sidecar-Priority: 9", b"x-sidecar-endpoint: evil", b"X-Sidecars: stay"]))
        [sent] = upstream.requests
        assert sent.values(b"x-sidecar-priority") == ([b"9"] if trusted else [])
        assert sent.header(b"x-sidecars") == b"stay"


@pytest.mark.parametrize("inference", [False, True], ids=["streamed", "inference"])
async def test_response_heads_cross_verbatim_and_sidecar_headers_are_ours(inference: bool, split: bool) -> None:
    lines = [
        b"Date: Sun, 29 Nov 2026 15:57:17 GMT",
        b"server: uvicorn",
        b"Content-Type: application/json",
        b"Set-Cookie: a=1",
        b"set-cookie: b=2",
        b"X-Latin: \xe9\xff",
        b"X-Empty:",
        b'ETag: "x"',
    ]
    forged = [b"X-Sidecar-Endpoint: forged", b"x-sidecar-reason: forged"]
    async with relayed(answers(response(COMPLETION, status=b"200 Very Fine", headers=[*lines, *forged])), split) as (
        upstream,
        _,
        client,
    ):
        got = await client.ask(chat(stream=False) if inference else request(), b"POST" if inference else b"GET")
        assert got.start == b"HTTP/1.1 200 Very Fine"
        pairs = [(line.partition(b":")[0], line.partition(b":")[2].strip(b" ")) for line in lines]
        assert passed(got, ADDED_DOWN) == pairs
        assert got.header(b"x-sidecar-endpoint") == upstream.key.encode()
        assert got.header(b"x-sidecar-version") == b"v1"
        assert got.header(b"x-sidecar-attempts") == b"1"


@pytest.mark.parametrize(
    "status",
    [b"200 OK", b"201 ", b"299 Odd", b"302 Found", b"401 No", b"404 Not Here", b"418 I'm", b"503 \xe9", b"599 Custom"],
    ids=lambda status: status[:3].decode(),
)
async def test_status_and_phrase_cross(status: bytes, split: bool) -> None:
    async with relayed(answers(response(b"body", status=status)), split) as (_, _, client):
        got = await client.ask(request())
        assert (got.start, got.body) == (b"HTTP/1.1 " + status, b"body")


async def test_nobody_is_told_of_a_via(split: bool) -> None:
    async with relayed(answers(response()), split) as (upstream, _, client):
        got = await client.ask(request())
        assert got.values(b"via") == [] and upstream.requests[0].values(b"via") == []
