"""What a request of the plan is in bytes, and what its answer must be, to the byte.

The simulated engines are deterministic: an answer depends on the request's body and id alone, whichever engine gives
it, at whichever attempt. Pure.
"""

import msgspec

from sidecar.demo.dialect import SHAPES, Spec, whole_stream
from sidecar.demo.script import Script
from soak.plan import INFERENCE, STREAMS, UPLOADS, Ask, Carriage, Kind
from soak.policies import BODY_LIMIT

MODELS = ("chat-large", "chat-fast", "small")

PACED = Script(first_token_s=0.02, token_gap_s=0.02, models=MODELS, keep=0)
FAST = msgspec.structs.replace(PACED, first_token_s=0.005, token_gap_s=0.0)
"""The small model's: megabytes of a stream at once."""

PATHS = {
    Kind.COMPLETION_STREAM: b"/v1/completions",
    Kind.COMPLETION: b"/v1/completions",
    Kind.MESSAGES_STREAM: b"/v1/messages",
    Kind.RESPONSES_STREAM: b"/v1/responses",
    Kind.EMBEDDINGS: b"/v1/embeddings",
    Kind.MODELS: b"/v1/models",
    Kind.MODELS_HEAD: b"/v1/models",
    Kind.NOT_FOUND: b"/nothing/here",
    **dict.fromkeys(UPLOADS, b"/_echo"),
}
CHAT = b"/v1/chat/completions"
MODELS_PAGE = b'{"object":"list","data":[%b]}' % b",".join(
    b'{"id":"%b","object":"model","created":1795967836,"owned_by":"vllm","root":"%b","parent":null,"max_model_len":4096}'
    % (name.encode(), name.encode())
    for name in MODELS
)
BAD_JSON = b'{"model": "chat-large", "messages": ['

MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    (b"GET /x HTTP/1.1\r\n\r\n", 400),
    (b"GET /x HTTP/1.1\nhost: a\n\n", 400),
    (b"GET /x HTTP/1.2\r\nhost: a\r\n\r\n", 400),
    (b"GET  /x HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"GET /x HTTP/1.1\r\nhost : a\r\n\r\n", 400),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", 400),
    (b"this is no request\r\n\r\n", 400),
    (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    (b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -3\r\n\r\n", 400),
    (b"GET /x HTTP/1.1\r\nhost: a\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n", 431),
)
"""Heads that are refused, and with what."""


def path_of(ask: Ask) -> bytes:
    """Where it is sent."""
    return PATHS.get(ask.kind, CHAT)


def method_of(ask: Ask) -> bytes:
    """Its method."""
    if ask.kind is Kind.MODELS_HEAD:
        return b"HEAD"
    return b"GET" if ask.kind in (Kind.MODELS, Kind.NOT_FOUND) else b"POST"


def id_of(ask: Ask) -> str:
    """Its `x-request-id`."""
    return f"soak-{ask.number}"


def body_of(ask: Ask) -> bytes:
    """Its body, without framing; empty where it has none."""
    if ask.kind in UPLOADS:
        seed = b"%d " % ask.number
        return (seed * (ask.size // len(seed) + 1))[: ask.size]
    if ask.kind is Kind.BAD_JSON:
        return BAD_JSON
    if ask.kind not in INFERENCE or ask.kind is Kind.TOO_LARGE:
        return b""
    prompt = ("lorem ipsum " * (ask.size // 12 + 1))[: ask.size]
    stream = ask.kind in STREAMS
    body: dict[str, object] = {"model": ask.model, "stream": stream}
    if stream and ask.usage and ask.kind is not Kind.RESPONSES_STREAM:
        body["stream_options"] = {"include_usage": True}
    match ask.kind:
        case Kind.EMBEDDINGS:
            body["input"] = prompt
        case Kind.COMPLETION | Kind.COMPLETION_STREAM:
            body |= {"max_tokens": ask.tokens, "prompt": prompt}
        case Kind.RESPONSES_STREAM:
            body |= {"max_output_tokens": ask.tokens, "input": prompt}
        case _:
            body |= {"max_tokens": ask.tokens, "messages": [{"role": "user", "content": prompt}]}
    return msgspec.json.encode(body)


def head_and_body(ask: Ask, carriage: Carriage, *, expect: bool = False) -> tuple[bytes, bytes]:
    """The bytes of the request: its head, and what follows (framed)."""
    if ask.kind is Kind.MALFORMED:
        return MALFORMED[ask.variant % len(MALFORMED)][0], b""
    http_10 = carriage in (Carriage.HTTP_10, Carriage.HTTP_10_KEPT)
    body = body_of(ask)
    lines = [b"%b %b HTTP/1.%d" % (method_of(ask), path_of(ask), 0 if http_10 else 1)]
    if not http_10:
        lines.append(b"host: engines")
    lines.append(b"x-request-id: " + id_of(ask).encode())
    if carriage is Carriage.ONCE:
        lines.append(b"connection: close")
    elif carriage is Carriage.HTTP_10_KEPT:
        lines.append(b"connection: keep-alive")
    if ask.session:
        lines.append(b"x-session-id: " + ask.session.encode())
    if ask.fault:
        lines.append(b"x-demo-fault: " + ask.fault.encode())
    if expect:
        lines.append(b"expect: 100-continue")
    if method_of(ask) == b"POST":
        lines.append(b"content-type: application/json")
        if ask.kind is Kind.TOO_LARGE:
            lines.append(b"content-length: %d" % (BODY_LIMIT + 1))
        elif ask.kind is Kind.ECHO_CHUNKED and not http_10:
            lines.append(b"transfer-encoding: chunked")
            body = b"".join(
                b"%x\r\n%b\r\n" % (len(piece), piece)
                for piece in (body[at : at + 1000] for at in range(0, len(body), 1000))
            )
            body += b"0\r\n\r\n"
        else:
            lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n", body


def whole(ask: Ask) -> tuple[int, bytes]:
    """Status and body of the answer, if nothing goes wrong."""
    match ask.kind:
        case Kind.MODELS:
            return 200, MODELS_PAGE
        case Kind.MODELS_HEAD:
            return 200, b""
        case Kind.NOT_FOUND:
            return 404, b'{"detail":"Not Found"}'
        case Kind.ECHO | Kind.ECHO_CHUNKED | Kind.BULK:
            return 200, body_of(ask)
    spec = Spec(
        ask.model,
        id_of(ask),
        ask.tokens if ask.kind is not Kind.EMBEDDINGS else PACED.tokens,
        len(body_of(ask)) // 4,
        "stop" if ask.kind is Kind.EMBEDDINGS else "length",
        usage=ask.usage,
    )
    shape = SHAPES[path_of(ask)](spec)
    return 200, whole_stream(shape, spec.tokens) if ask.kind in STREAMS else shape.plain()
