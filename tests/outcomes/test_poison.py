"""Poison over real sockets: a prompt that kills two engines is not sent to a third, whoever asks and however."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from sidecar.policy.schema import Breakers, Deadlines, Poison, RequestBreaker, Retry, Seconds, Service
from tests.harness import Gone, Message, Peer, Script, Upstream, eventually, request, says
from tests.outcomes.test_table import deadlines, then
from tests.under_test import (
    COMPLETION,
    DONE,
    JSON,
    NODE_OFF,
    PATIENT,
    ROLE,
    SESSION_OFF,
    Sidecar,
    chat,
    error_body,
    event,
    events,
    json_answer,
    refusal,
    service,
    sidecar,
    stream_of,
    whole_stream,
)

SOON = Seconds(0.12)
HALF_STREAM = stream_of(*events(3)[:3], end=False)
RESET = then(b"", "reset")
RETRY = Retry(attempts=5, budget_min=100)
POISON = "poison"


def killed_by(prompt: str, dies: Script) -> Script:
    """An engine that serves everything but `prompt`."""

    async def play(peer: Peer) -> None:
        while True:
            asked = await peer.request()
            if prompt.encode() in asked.body:
                await dies(peer)
            else:
                stream = b'"stream":true' in asked.body
                await peer.send(whole_stream() if stream else json_answer(COMPLETION))

    return play


def rule(**changes: object) -> Breakers:
    """Poison alone."""
    poison = msgspec.structs.replace(Poison(), **changes)
    return Breakers(node=NODE_OFF, session=SESSION_OFF, request=RequestBreaker(mode="off", poison=poison))


@dataclass
class Fleet:
    """Some engines behind a sidecar."""

    engines: list[Upstream]
    proxy: Sidecar

    @property
    def asked(self) -> list[int]:
        """How many requests each engine got, the busiest first."""
        return sorted((len(engine.requests) for engine in self.engines), reverse=True)

    async def ask(self, text: str = POISON, **changes: object) -> Message:
        return await self.proxy.once(chat(text=text, **changes))  # type: ignore[arg-type]

    async def all_serve(self) -> None:
        """Every engine is well and has served somebody."""
        served = [len(engine.requests) for engine in self.engines]
        for _ in range(100):
            assert (await self.ask("harmless")).status == 200
            if all(len(engine.requests) > had for engine, had in zip(self.engines, served, strict=True)):
                return
        raise AssertionError("some engine is asked by nobody")

    @property
    def suspects(self) -> int:
        return sum(len(state.suspects) for state in self.proxy.running.fleet.services.values())


@contextlib.asynccontextmanager
async def fleet(
    dies: Script = RESET, count: int = 4, limits: Deadlines = PATIENT, retry: Retry = RETRY, **changes: object
) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream(killed_by(POISON, dies))) for _ in range(count)]
        plan: Service = service(*engines, breakers=rule(**changes), retry=retry, deadlines=limits)
        yield Fleet(engines, await stack.enter_async_context(sidecar(plan)))


LAST_WORDS = error_body(b"EngineCore encountered an issue. See stack trace (above) for the root cause.")
DEATHS = [
    pytest.param(says(json_answer(LAST_WORDS, b"500 Internal Server Error")), PATIENT, id="last-words"),
    pytest.param(says(stream_of(event(LAST_WORDS), DONE)), PATIENT, id="last-words-in-band"),
    pytest.param(RESET, PATIENT, id="reset"),
    pytest.param(then(b"", "fin"), PATIENT, id="fin"),
    pytest.param(says(b"\x00\x01 no HTTP\r\n\r\n"), PATIENT, id="bad-bytes"),
    pytest.param(then(stream_of(ROLE, end=False), "reset"), PATIENT, id="cut-before-a-token"),
    pytest.param(then(b"", "silence"), deadlines(head_s=SOON), id="no-head"),
    pytest.param(then(stream_of(ROLE, end=False), "silence"), deadlines(first_token_s=SOON), id="no-token"),
]


@pytest.mark.parametrize(("dies", "limits"), DEATHS)
async def test_one_request_kills_two_engines_and_not_a_third(dies: Script, limits: Deadlines) -> None:
    async with fleet(dies, limits=limits) as fleet_:
        got = await fleet_.ask()
        assert refusal(got) == (422, "poisoned_request", "poisoned_request")
        assert got.header(b"x-should-retry") == b"false" and not got.values(b"retry-after")
        assert got.header(b"x-sidecar-attempts") == b"2"
        assert fleet_.asked == [1, 1, 0, 0]
        assert refusal(await fleet_.ask())[1] == "poisoned_request"
        assert fleet_.asked == [1, 1, 0, 0], "nobody's request for it is sent any more"


LATE_DEATHS = [
    pytest.param(then(HALF_STREAM, "reset"), PATIENT, "upstream_truncated", id="reset"),
    pytest.param(then(HALF_STREAM, "silence"), deadlines(token_gap_s=SOON), "token_gap_timeout", id="stall"),
]


@pytest.mark.parametrize(("dies", "limits", "code"), LATE_DEATHS)
async def test_engines_that_die_in_mid_answer_count_although_nothing_is_sent_again(
    dies: Script, limits: Deadlines, code: str
) -> None:
    async with fleet(dies, count=2, limits=limits) as fleet_:
        # Which engine is asked is chance; one that died of it before counts once.
        for _ in range(40):
            got = await fleet_.ask()
            if got.status != 200:
                break
            assert code.encode() in got.body
            for engine in fleet_.engines:
                assert len(engine.requests) < 40
        assert refusal(got)[1] == "poisoned_request"
        assert all(engine.requests for engine in fleet_.engines)


NO_DEATHS = [
    pytest.param(says(json_answer(error_body(), b"500 Oh")), 500, id="500"),
    pytest.param(says(json_answer(error_body(b"slow", b"429"), b"429 Slow")), 429, id="429"),
    pytest.param(says(json_answer(error_body(b"bad", b"400"), b"400 Bad")), 400, id="400"),
    pytest.param(says(stream_of(event(error_body()), DONE)), 200, id="error-in-band"),
    pytest.param(says(stream_of()), 502, id="empty"),
]


@pytest.mark.parametrize(("dies", "status"), NO_DEATHS)
async def test_engines_that_answer_did_not_die(dies: Script, status: int) -> None:
    async with fleet(dies) as fleet_:
        for _ in range(3):
            assert (await fleet_.ask()).status in (status, 429)
        assert fleet_.suspects == 0


async def test_other_prompts_and_other_models_are_served() -> None:
    async with fleet() as fleet_:
        await fleet_.ask()
        await fleet_.all_serve()
        for asked in (chat(text="poison too"), chat(text=POISON, model="other")):
            await fleet_.all_serve()
            before = [len(engine.requests) for engine in fleet_.engines]
            assert refusal(await fleet_.proxy.once(asked))[1] == "poisoned_request"
            killed = [len(engine.requests) > had for engine, had in zip(fleet_.engines, before, strict=True)]
            assert sum(killed) == 2, "it had to kill two by itself"


@pytest.mark.parametrize("body", [{"temperature": 1.5}, {"stream": False}, {"max_tokens": 3, "seed": 7}])
async def test_how_it_is_to_be_answered_makes_no_other_prompt(body: dict[str, object]) -> None:
    async with fleet() as fleet_:
        await fleet_.ask()
        asked = {"messages": [{"role": "user", "content": POISON}], "model": "m"} | body
        again = request(b"/v1/chat/completions", method=b"POST", headers=[JSON], body=msgspec.json.encode(asked))
        assert refusal(await fleet_.proxy.once(again))[1] == "poisoned_request"
        assert fleet_.asked == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/completions", b'{"model":"m","prompt":"poison"}'),
        (b"/v1/responses", b'{"model":"m","input":"poison","instructions":"be brief"}'),
        (b"/v1/messages", b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"poison"}]}'),
        (b"/v1/embeddings", b'{"model":"m","input":["poison"]}'),
        (b"/v1/rerank", b'{"model":"m","query":"poison","documents":["a"]}'),
    ],
)
async def test_every_api_has_prompts(path: bytes, body: bytes) -> None:
    async with fleet() as fleet_:
        asked = request(path, method=b"POST", headers=[JSON], body=body)
        for _ in range(2):
            assert refusal(await fleet_.proxy.once(asked))[1] == "poisoned_request"
        assert fleet_.asked == [1, 1, 0, 0]


async def test_without_retries_it_takes_two_requests() -> None:
    async with fleet(count=2, retry=Retry(attempts=1)) as fleet_:
        got = [await fleet_.ask() for _ in range(40)]
        assert {refusal(each)[:2] for each in got} == {(502, "upstream_reset"), (422, "poisoned_request")}
        assert got[-1].status == 422 and all(engine.requests for engine in fleet_.engines)


async def test_one_endpoint_condemns_nothing() -> None:
    async with fleet(count=1) as fleet_:
        for _ in range(3):
            assert refusal(await fleet_.ask())[1] == "upstream_reset"


async def test_one_endpoint_may_be_enough_by_policy() -> None:
    async with fleet(count=1, nodes=1) as fleet_:
        assert [refusal(await fleet_.ask())[1] for _ in range(2)] == ["poisoned_request"] * 2
        assert fleet_.asked == [1]


async def test_shadow_counts_and_sends_on() -> None:
    async with fleet(mode="shadow") as fleet_:
        assert refusal(await fleet_.ask())[1] == "upstream_reset"
        assert sum(fleet_.asked) == 5
        text, _ = await fleet_.proxy.running.exposition()
        assert b'sidecar_poison_shadow_refused_total{service="default"} 4' in text
        assert b'sidecar_poison_condemned_total{service="default"} 1' in text


async def test_off_remembers_nothing() -> None:
    async with fleet(mode="off") as fleet_:
        assert refusal(await fleet_.ask())[1] == "upstream_reset"
        assert sum(fleet_.asked) == 5 and fleet_.suspects == 0


async def test_after_ttl_it_is_tried_again() -> None:
    async with fleet(ttl_s=Seconds(0.05)) as fleet_:
        await fleet_.ask()

        def over() -> bool:
            state = next(iter(fleet_.proxy.running.fleet.services.values()))
            return not state.suspects.as_long(0, fleet_.proxy.running.now()) and not state.suspects.armed

        await eventually(over, "ttl")
        before = sum(fleet_.asked)
        await fleet_.ask()
        assert sum(fleet_.asked) > before


async def test_the_metrics_tell_how_many_and_nothing_of_what() -> None:
    async with fleet() as fleet_:
        await fleet_.ask()
        await fleet_.ask()
        text, _ = await fleet_.proxy.running.exposition()
        assert b'sidecar_poison_suspects{service="default"} 1' in text
        assert b'reason="poisoned_request"' in text
        assert b"poison," not in text and POISON.encode() + b'"' not in text


async def test_a_prompt_that_an_engine_serves_is_cleared() -> None:
    """The first engine dies, the next serves it: it was not the prompt."""
    deaths = 0

    async def kills_once(peer: Peer) -> None:
        nonlocal deaths
        if deaths:
            await peer.send(whole_stream())
            return
        deaths += 1
        peer.reset()
        await peer.gone()
        raise Gone

    async with fleet(kills_once) as fleet_:
        assert (await fleet_.ask()).status == 200
        assert fleet_.suspects == 0


async def test_an_engine_that_died_at_once_and_is_gone_counts_although_its_connection_seemed_stale() -> None:
    """A used connection that breaks at once is taken for stale, and the request sent anew; then nobody listens."""

    async with contextlib.AsyncExitStack() as stack:
        engines: list[Upstream] = []

        def dies_for_good(number: int) -> Script:
            async def exits(peer: Peer) -> None:
                engines[number].stop_listening()
                peer.reset()
                await peer.gone()
                raise Gone

            return exits

        for number in range(3):
            engines.append(await stack.enter_async_context(Upstream(killed_by(POISON, dies_for_good(number)))))
        plan = service(*engines, breakers=rule(), retry=RETRY)
        fleet_ = Fleet(engines, await stack.enter_async_context(sidecar(plan)))
        await fleet_.all_serve()
        assert refusal(await fleet_.ask())[1] == "poisoned_request"
        assert (await fleet_.ask("harmless")).status == 200


async def test_innocents_on_an_engine_that_dies_are_served_elsewhere_and_cleared() -> None:
    async with fleet(count=4) as fleet_:
        for number in range(5):
            assert (await fleet_.ask(f"fine {number}")).status == 200
        await fleet_.ask()
        assert fleet_.suspects == 1
        assert (await fleet_.ask("fine 1")).status == 200
