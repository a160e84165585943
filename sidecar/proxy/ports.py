"""What the request path needs of the world, as Protocols, and the records it hands out at the end of things."""

from typing import Any, Final, Protocol

from sidecar.core.breaker import Transition
from sidecar.core.identify import Claims
from sidecar.core.poison import Condemned
from sidecar.kernel.errors import Reason, Refusal
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.policy.schema import Endpoint


class AttemptRecord:
    """One wire attempt, at its end. Times in seconds; `ttft_s` None where no token came. `copy`: a probe by copy."""

    __slots__ = (
        "copy",
        "duration_s",
        "ending",
        "endpoint",
        "malformed_events",
        "result",
        "reused_connection",
        "service",
        "status",
        "ttft_s",
        "version",
    )

    def __init__(
        self,
        service: str,
        version: str,
        endpoint: EndpointKey,
        ending: Ending,
        result: Result,
        status: int,
        duration_s: float,
        ttft_s: float | None,
        malformed_events: int,
        reused_connection: bool,
        copy: bool = False,
    ) -> None:
        self.copy = copy
        self.service = service
        self.version = version
        self.endpoint = endpoint
        self.ending = ending
        self.result = result
        self.status = status
        self.duration_s = duration_s
        self.ttft_s = ttft_s
        self.malformed_events = malformed_events
        self.reused_connection = reused_connection


class RequestRecord:
    """One request, at its end: the canonical log line. Times in seconds; None where it did not happen.

    `status` is what the client got (499: it left before a head went out). `flag` is the access-log flag of Envoy
    users, empty on success. `qos` is its class, empty where nothing asked for one. `queued_s` is how long it waited for
    its turn (None: it did not); `counted` how its prompt was counted, `exact`, `cached` or `estimated` (empty: nothing
    needed the number); `reserved_tokens` what was taken from quotas before it went; `shadowed` the word of what
    enforcing would have done, where a limit is in shadow; `why` the word of what was wrong with its token, where that
    was refused.
    """

    __slots__ = (
        "attempts",
        "bytes_in",
        "bytes_out",
        "client",
        "completion_tokens",
        "counted",
        "duration_s",
        "endpoint",
        "finish_reason",
        "flag",
        "max_gap_s",
        "method",
        "model",
        "path",
        "prompt_tokens",
        "qos",
        "queued_s",
        "reason",
        "request_id",
        "reserved_tokens",
        "result",
        "service",
        "session",
        "shadowed",
        "status",
        "stream",
        "tenant",
        "tokens",
        "trace_id",
        "ttft_s",
        "version",
        "why",
    )

    def __init__(
        self,
        request_id: str,
        trace_id: str,
        client: str,
        method: str,
        path: str,
        service: str,
        model: str,
        version: str,
        endpoint: str,
        session: str,
        status: int,
        reason: Reason | None,
        flag: str,
        result: Result,
        stream: bool,
        attempts: int,
        bytes_in: int,
        bytes_out: int,
        duration_s: float,
        ttft_s: float | None,
        tokens: int,
        max_gap_s: float | None,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        finish_reason: str | None,
        tenant: str = "",
        qos: str = "",
        queued_s: float | None = None,
        counted: str = "",
        reserved_tokens: int = 0,
        shadowed: str = "",
        why: str = "",
    ) -> None:
        self.request_id = request_id
        self.trace_id = trace_id
        self.client = client
        self.method = method
        self.path = path
        self.service = service
        self.model = model
        self.version = version
        self.endpoint = endpoint
        self.session = session
        self.status = status
        self.reason = reason
        self.flag = flag
        self.result = result
        self.stream = stream
        self.attempts = attempts
        self.bytes_in = bytes_in
        self.bytes_out = bytes_out
        self.duration_s = duration_s
        self.ttft_s = ttft_s
        self.tokens = tokens
        self.max_gap_s = max_gap_s
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.finish_reason = finish_reason
        self.tenant = tenant
        self.qos = qos
        self.queued_s = queued_s
        self.counted = counted
        self.reserved_tokens = reserved_tokens
        self.shadowed = shadowed
        self.why = why


class Recorder(Protocol):
    """Telemetry: takes what ended. Never waits, never raises."""

    def attempt(self, record: AttemptRecord) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def transition(self, transition: Transition, trace: str = "") -> None:
        """A breaker moved; `trace` is the trace id of the request that moved it, in hex, where there was one."""

    def condemned(self, prompt: Condemned) -> None:
        """A prompt that crashed or hung too many endpoints is refused from now on, or would be."""

    def refused(self, reason: Reason) -> None:
        """A request that never became one: malformed, oversized or too slow heads."""

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        """Bytes from an engine that are not HTTP, or bytes after an answer's end."""


class Template(Protocol):
    """Makes a prompt of a chat."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt. Raises `SidecarError` (`BAD_REQUEST`) for messages that the template refuses."""


class Templates(Protocol):
    """The chat templates that the policy in force names. Read before, never on a request's way."""

    def of(self, path: str) -> Template | None:
        """The template of a file or model folder as the policy writes it; None: there is none ("") or it is bad."""

    def why_not(self, path: str) -> str:
        """Why `of` gives None, in words for whoever asked for a chat."""

    def awaits(self, path: str) -> bool:
        """Whether `of` gives None because it is being read."""


class NoTemplates:
    """Where no policy names any."""

    __slots__ = ()

    def of(self, path: str) -> Template | None:
        return None

    def why_not(self, path: str) -> str:
        return "its endpoint has no chat_template"

    def awaits(self, path: str) -> bool:
        return False


class Waiter(Protocol):
    """Whoever waits for something that is found out beside the loop's other work."""

    def woken(self) -> None:
        """It is known now, or the time for it is over: ask again. At most once for each time that one had to wait, and
        never from inside the call that said so."""


class Verified:
    """Nothing speaks against the request's credentials. `claims` are a verified token's; empty: there was no token."""

    __slots__ = ("claims",)

    def __init__(self, claims: Claims) -> None:
        self.claims = claims


class Unverified:
    """A request to be refused: `detail` is for the client and holds nothing of its token or of the keys.

    `reason`: `UNAUTHORIZED`, or `KEYS_UNAVAILABLE` while nobody can tell; then with `retry_after_s`. `why`: what was
    wrong with the token in one word, for operators; empty where nobody can tell.
    """

    __slots__ = ("detail", "reason", "retry_after_s", "why")

    def __init__(self, reason: Reason, detail: str, retry_after_s: float | None = None, why: str = "") -> None:
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.why = why


class Verifier(Protocol):
    """Says whose a request is, by the token in it. Implemented by jwt. Never waits, never raises.

    `required`: a request without a token is refused; `verify` sees to it, too.
    """

    @property
    def required(self) -> bool: ...

    def verify(self, authorization: bytes, now_wall: float, waiter: Waiter) -> Verified | Unverified | None:
        """Judges the request's `authorization` (`core.identify.authorization`); `now_wall`: seconds since the epoch.

        None: keys are being fetched. `waiter` is woken within 2 s; asked again with it, `verify` gives no None.
        """

    def forget(self, waiter: Waiter) -> None:
        """It will not ask again: it left. Again, or of one that never waited, is harmless."""


class Counted:
    """How many tokens a prompt has, and how that is known: `exact`, `cached` (exact but for its tail) or
    `estimated`."""

    __slots__ = ("how", "tokens")

    def __init__(self, tokens: int, how: str) -> None:
        self.tokens = tokens
        self.how = how


class TokenCounter(Protocol):
    """Counts prompts, in the time that a request has. Implemented by tokens. Never raises."""

    def count(self, service: str, model: str, prompt: bytes, time_s: float, waiter: Waiter) -> Counted | None:
        """`prompt` as `wire.prompt.prompt_of` gives it, at least 1 token; `time_s`: what the request can wait, >= 0.

        None: it is being counted elsewhere; `waiter` is woken within `time_s`, and asks again with the same `prompt`
        and its time as it then is: it then gets a count at once. A waiter that leaves says so (`forget`).
        """

    def forget(self, waiter: Waiter) -> None:
        """It is not to be woken any more. Harmless where it waits for nothing."""

    def reported(self, service: str, model: str, prompt: bytes, tokens: int) -> None:
        """What the engine says that the prompt of an answer had, at its end: the estimates learn by it."""


BYTES_PER_TOKEN: Final = 4
"""Of English in the tokenizers of today: what is assumed where nothing is known."""


class NoCounter:
    """Where nothing is counted: a guess by size."""

    __slots__ = ()

    def count(self, service: str, model: str, prompt: bytes, time_s: float, waiter: Waiter) -> Counted | None:
        return Counted(len(prompt) // BYTES_PER_TOKEN + 1, "estimated")

    def forget(self, waiter: Waiter) -> None:
        pass

    def reported(self, service: str, model: str, prompt: bytes, tokens: int) -> None:
        pass


class Client(Protocol):
    """The client's side of one request: the reply, with back-pressure. Implemented by downstream.

    `loopback`: it is a peer on this machine (`wire.peer.came_by_loopback`).
    """

    peer: str
    loopback: bool

    @property
    def scheme(self) -> bytes: ...

    @property
    def can_append(self) -> bool: ...

    def send_informational(self, head: ResponseHead) -> None: ...

    def send_head(self, head: ResponseHead, extra: bytes, body: bytes) -> None: ...

    def send_body(self, data: bytes) -> None: ...

    def send_end(self, trailers: list[bytes]) -> None: ...

    def refuse(self, refusal: Refusal, request_id: bytes, extra: bytes) -> None: ...

    def start_tunnel(self, head: ResponseHead, extra: bytes, data: bytes) -> None: ...

    def cut(self) -> None: ...

    def close_after_reply(self) -> None: ...

    def pause_upload(self) -> None: ...

    def resume_upload(self) -> None: ...

    def exchange_done(self) -> None: ...


class Link(Protocol):
    """One connection to an engine, lent for one attempt. Implemented by upstream."""

    @property
    def used(self) -> bool: ...

    @property
    def received(self) -> bool: ...

    def send(self, sink: "Sink", head: bytes, body: bytes, *, head_only: bool, upgrade: bool) -> None: ...

    def open_upload(self, *, chunked: bool) -> None: ...

    def upload(self, data: bytes) -> None: ...

    def end_upload(self, trailers: list[bytes]) -> None: ...

    def send_tunnel(self, data: bytes) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Who hears what happens on a link: the attempt. After `abort`, `on_end`, `on_lost`, `on_bad_bytes`: nothing."""

    def on_connected(self, link: Link) -> None: ...

    def on_connect_failed(self, detail: str) -> None: ...

    def on_informational(self, head: ResponseHead) -> None: ...

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, trailers: list[bytes]) -> bool:
        """The answer's framing came to its end; false: its content is so odd that the link must not be lent again.

        Judges and goes no further: that is for `on_released`, which follows.
        """

    def on_released(self) -> None:
        """The link was given back after its answer's end."""

    def on_lost(self) -> None: ...

    def on_bad_bytes(self, detail: str) -> None: ...

    def on_tunnel(self, head: ResponseHead, data: bytes) -> None: ...

    def on_tunnel_data(self, data: bytes) -> None: ...

    def on_upload_paused(self) -> None: ...

    def on_upload_resumed(self) -> None: ...


class Connector(Protocol):
    """Where links come from. Implemented by upstream."""

    def open(
        self, key: EndpointKey, endpoint: Endpoint, connect_s: float, sink: Sink, *, fresh: bool = False
    ) -> None: ...

    def cancel(self, sink: Sink) -> None: ...
