"""An attempt at an engine that does not speak OpenAI's API: asked in its own words, read as if it had used ours.

The ordinary attempt does all the rest. It is handed an answer as a vLLM would have sent it, so deadlines, what is held
before it is committed, how an answer is judged and what the client is told are the same for every engine:

1. What the client asks is read once per request (`Translation`) and put into the engine's words once per attempt, for
   the next one may be at another engine.
2. A head goes on when the client's status is known: with a stream at once, otherwise when the engine has said all. An
   answer that is collected (the engine streams, the client does not) is watched by its tokens: as long as they come, it
   may take as long as a stream may. Once all was said its framing is not waited for: as a stream's, it may never end.
3. What an engine cannot do keeps it out of the choice (`Translation.barred`), before anybody is asked.
"""

from collections.abc import Callable
from typing import Final

from sidecar.adapters import TRANSLATORS
from sidecar.adapters.ask import Ask, Body, messages_of, needs_of, prompt_of, read_body
from sidecar.adapters.dialect import Translator
from sidecar.adapters.reading import Reading
from sidecar.core.pool import Foreign, Node, Without
from sidecar.core.service import ServiceState, Times
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.kernel.exchange import ResponseHead
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending
from sidecar.policy.schema import front_of
from sidecar.proxy.attempt import ERROR_GRACE_S, Attempt, Owner, Phase
from sidecar.proxy.ports import Client, Connector, Templates
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.call import Api, Call
from sidecar.wire.refusal import PHRASES

_CHAT: Final = Api.CHAT
_COMPLETIONS: Final = Api.COMPLETIONS
_GENERATE: Final = b"/generate"
_GENERATES: Final = frozenset({"generate"})
_PATHS: Final = frozenset({*Api, "generate"})
"""Needs that are no field of a body."""
_WAITING: Final = Phase.WAITING
_DONE: Final = Phase.DONE

_OURS: Final = frozenset({b"content-type", b"content-encoding", b"trailer", b"accept", b"accept-encoding"})
"""What a client says of its body and of the answers it takes: the engine gets another body, and its answer is read."""


class Translation:
    """One request, to be put into engines' words.

    `why` says what the endpoints that `barred` named last cannot do, `param` which field asks for it; `without` is the
    kinds of them.
    """

    __slots__ = (
        "_awaited",
        "_body",
        "_call",
        "_created",
        "_needs",
        "_request_id",
        "_templates",
        "_unreadable",
        "_unreadable_for",
        "param",
        "why",
        "without",
    )

    def __init__(
        self, call: Call, data: bytes, request_id: str, created: int, templates: Templates, path: bytes = b""
    ) -> None:
        self._call = call
        self._request_id = request_id
        self._created = created
        self._templates = templates
        self._body: Body | None = None
        self._unreadable = ""
        self._unreadable_for = Reason.BAD_REQUEST
        self._awaited = False
        self.why = ""
        self.param: str | None = None
        self.without: Without = ()
        if call.api is _CHAT or call.api is _COMPLETIONS:
            try:
                self._body = body = read_body(data)
            except SidecarError as exc:
                self._unreadable, self._unreadable_for = exc.detail, exc.reason
            else:
                # An engine that is sent a prompt would answer one of nothing, at length.
                if call.api is _CHAT and not body.messages:
                    self._unreadable = "messages: must be a list of at least one message"
                elif call.api is _COMPLETIONS and body.prompt is None:
                    self._unreadable = "prompt: is missing"
        self._needs = needs_of(call.api, call.n, self._body) if not self._unreadable else frozenset[str]()
        if path == _GENERATE:
            self._needs = _GENERATES  # vLLM had it once, MII's api_server has nothing else

    def barred(self, service: ServiceState) -> list[EndpointKey]:
        """The endpoints of `service` that cannot be asked this."""
        barred: list[EndpointKey] = []
        without: list[Foreign] = []
        for foreign, keys in service.foreign.items():
            engine, front, template = foreign
            if not self._can(TRANSLATORS[(engine, front)], template):
                barred.extend(keys)
                without.append(foreign)
        self.without = tuple(without)
        return barred

    def _can(self, translator: Translator, template: str) -> bool:
        if self._unreadable:
            self.why = self._unreadable
            return False
        for need in self._needs:
            if need == "chat":
                if translator.applies_template or self._templates.of(template) is not None:
                    continue
                self._lacks(f"{translator.name} takes no chats: {self._templates.why_not(template)}", "messages")
                self._awaited = self._awaited or self._templates.awaits(template)
                return False
            lack = translator.lacks.get(need)
            if lack is not None:
                if need in _PATHS:
                    self._lacks(f"{translator.name} cannot do this: {lack}")
                else:
                    self._lacks(f"{translator.name} cannot do `{need}`: {lack}", need)
                return False
        return True

    def _lacks(self, why: str, param: str | None = None) -> None:
        # What will be there in a moment is the better reason.
        if not self._awaited:
            self.why, self.param = why, param

    def bars_all(self, service: ServiceState) -> bool:
        """Whether nobody in `service` who has the model can be asked this; `why` speaks of those."""
        serving = {node.key for node in service.pool(self._call.model, None).nodes}
        left = len(serving)
        self._awaited = False
        for (engine, front, template), keys in service.foreign.items():
            found = serving.intersection(keys)
            if found and not self._can(TRANSLATORS[(engine, front)], template):
                left -= len(found)
        return bool(serving) and not left

    @property
    def reason(self) -> Reason:
        """Why nobody can be asked."""
        if self._unreadable:
            return self._unreadable_for
        return Reason.NO_ENDPOINT if self._awaited else Reason.UNSUPPORTED

    def translates(self, node: Node) -> bool:
        """Whether `node` has to be asked in other words."""
        return node.translated and self._body is not None

    def prepare(self, node: Node, request: Request) -> "Prepared":
        """The request as `node` is to get it. Raises `SidecarError` where a value or a chat's template forbids it."""
        endpoint, body = node.endpoint, self._body
        assert body is not None
        translator = TRANSLATORS[(endpoint.engine, front_of(endpoint))]
        if self._call.api is not _CHAT:
            prompt = prompt_of(body)
        elif translator.applies_template:
            prompt = ""
        else:
            template = self._templates.of(endpoint.chat_template)
            if template is None:
                raise SidecarError(Reason.UNSUPPORTED, "local", self._templates.why_not(endpoint.chat_template))
            prompt = template.render(messages_of(body))
        ask = Ask(
            self._call,
            body,
            engine_model=endpoint.engine_model,
            prompt=prompt,
            request_id=self._request_id,
            created=self._created,
        )
        outgoing = translator.outgoing(ask)
        twin = request.copy()
        twin.target = outgoing.target
        twin.body = outgoing.body
        twin.lines = [line for line in request.lines if line[: line.index(b":")].lower() not in _OURS]
        twin.lines.append(b"content-type: application/json\r\n")
        twin.trailers = []
        ask.sent()
        return Prepared(request, twin, translator.reading(ask))


class Prepared:
    """A request, the same in an engine's words, and who reads the answer."""

    __slots__ = ("original", "reading", "request")

    def __init__(self, original: Request, request: Request, reading: Reading) -> None:
        self.original = original
        self.request = request
        self.reading = reading


class TranslatedAttempt(Attempt):
    """One attempt in an engine's own words."""

    __slots__ = ("_engine_answer", "_original", "_over", "_reading")

    def __init__(
        self,
        owner: Owner,
        prepared: Prepared,
        call: Call | None,
        client: Client,
        node: Node,
        connector: Connector,
        clock: Callable[[], float],
        watchdog: Watchdog,
        times: Times,
        total_at: float,
    ) -> None:
        super().__init__(owner, prepared.request, call, client, node, connector, clock, watchdog, times, total_at)
        self._original = prepared.original
        self._reading = prepared.reading
        self._engine_answer: ResponseHead | None = None
        self._over = False

    # What the link calls.

    def on_head(self, head: ResponseHead) -> None:
        self._engine_answer = head
        if head.encoded:
            self.detail = "the engine's answer is compressed, though it was not asked to be"
            self._end(Ending.BAD_BYTES)
            return
        reading = self._reading
        reading.head(head.status, head.content_type)
        if reading.status:
            super().on_head(self._client_head(None))

    def on_body(self, data: bytes) -> None:
        reading = self._reading
        tokens = reading.tokens
        out = reading.feed(data)
        if self.phase is _WAITING:
            if reading.said_all:
                if not self._over:
                    self._over = True
                    self._watch(self._clock() + ERROR_GRACE_S, Ending.HEAD_TIMEOUT)
            elif reading.tokens != tokens:
                self._collected()
        elif out:
            super().on_body(out)

    def on_end(self, trailers: list[bytes]) -> bool:
        self._tell()
        return self.phase is not _DONE and super().on_end([])

    def on_lost(self) -> None:
        if self.phase is _WAITING and self._engine_answer is not None:
            self._link = None
            self.detail = "the engine's answer broke off"
            self._end(Ending.TRUNCATED)
        else:
            super().on_lost()

    @property
    def spoke(self) -> bool:
        """Whether a token came, of an answer that is collected, too."""
        return self._reading.tokens > 0

    # Our own.

    def _commit(self) -> None:
        self._original.body = b""
        super()._commit()

    def _tell(self) -> None:
        """The rest of the client's answer, or all of it."""
        out = self._reading.end()
        if self.phase is _WAITING:
            super().on_head(self._client_head(len(out)))
        if out and self.phase is not _DONE:
            super().on_body(out)

    def _expired(self) -> None:
        if self.phase is not _WAITING or not self._over:
            super()._expired()
            return
        self._tell()
        if self.ending is None:
            self._closed_whole = True
            self._end(self._judge())

    def _collected(self) -> None:
        """Tokens came of an answer that is collected; nothing went to the client, so it may still go elsewhere."""
        self._watch(self._clock() + self._times.token_gap_s, Ending.HEAD_TIMEOUT)

    def _client_head(self, length: int | None) -> ResponseHead:
        engine, reading = self._engine_answer, self._reading
        status, media_type = reading.status, reading.media_type
        streams = media_type == b"text/event-stream"
        lines = [b"content-type: text/event-stream; charset=utf-8\r\n" if streams else _JSON_LINE]
        retry_after = engine.retry_after if engine is not None else ()
        lines.extend(b"%b: %b\r\n" % header for header in retry_after)
        return ResponseHead(
            status,
            PHRASES.get(status, b"OK" if status == 200 else b"Error"),
            lines,
            media_type,
            None if streams else length,
            False,
            b"",
            retry_after,
        )


_JSON_LINE: Final = b"content-type: application/json\r\n"
