"""Model updates against scripted engines, on a clock that goes when told: every step broken once on each of them."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.adapters.errand import Answer, Request
from sidecar.cli import main
from sidecar.core.breaker import Action, Scope
from sidecar.core.desk import TableView, outline
from sidecar.core.fleet import Fleet
from sidecar.core.hot_plan import Begun, UpdateView, Wanted
from sidecar.core.hot_update import Canary
from sidecar.core.pool import Node
from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.rules import revise
from sidecar.core.service import ServiceState
from sidecar.core.table import PARTS, Plan, Progress, Step, Table, decode, effective, encode
from sidecar.hot_updates import LEASE_S, HotUpdates
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.schema import Breakers, Deadlines, Endpoint, NodeBreaker, Seconds, Service, Snapshot
from sidecar.settings import Listen
from tests.harness import connect, request
from tests.hot_engines import HANGS, Engine, MiiEngine, TritonEngine, VllmEngine, error, listening, told
from tests.under_test import service as default
from tests.under_test import sidecar

EPOCH_S = 1_700_000_000
NAME = ServiceName("chat")


class Killed(BaseException):
    """The process ends, there and then."""


class Log:
    """The routing table that all sidecars have."""

    def __init__(self) -> None:
        self.view: TableView | None = None
        self.pods: list[Pod] = []
        self.away = False
        self.refuse: Callable[[Update], Refused | None] = lambda update: None
        self.written: list[str] = []

    def put(self, table: Table, why: str, evidence: str) -> Accepted:
        version = 1 if self.view is None else self.view.version + 1
        self.view = TableView(table, version, 0, "", why, evidence)
        self.written.append(evidence)
        for pod in self.pods:
            pod.fleet.put(effective(pod.policy, table), pod.clock.now)
        return Accepted(table, version)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.between: list[Callable[[], None]] = []
        """Called while time goes by."""

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for each in list(self.between):
            each()
        await asyncio.sleep(0)


class Pod:
    """One sidecar; its engines are everybody's."""

    def __init__(
        self, policy: Service, engines: dict[str, Engine], log: Log | None = None, name: str = "pod-1"
    ) -> None:
        self.policy = policy
        self.engines = engines
        self.clock = Clock()
        self.log = log or Log()
        self.log.pods.append(self)
        self.fleet = Fleet(lambda: 0.5)
        self.fleet.apply(Snapshot(version=1, services=(policy,)), self.clock.now)
        self.members = 1
        self.orders: list[tuple[str, str, str]] = []
        self.lines: list[tuple[str, str, dict[str, Any]]] = []
        self.steps: list[tuple[str, str]] = []
        self.ids = iter(range(1, 100))
        self.name = name
        self.tasks: asyncio.TaskGroup | None = None

    @property
    def service(self) -> ServiceState:
        return self.fleet.services[NAME]

    def node(self, key: str) -> Node:
        return self.service.nodes[EndpointKey(key)]

    def conductor(self, tasks: asyncio.TaskGroup) -> HotUpdates:
        return HotUpdates(
            self.fleet,
            self,
            ask=self.ask,
            order=self.order,
            tasks=tasks,
            observer=self.name,
            clock=lambda: self.clock.now,
            server_us=lambda now: int((EPOCH_S + now) * 1e6),
            wall=lambda: EPOCH_S + self.clock.now,
            members=lambda: self.members,
            new_id=lambda: f"u{next(self.ids)}",
            say=lambda level, event, **fields: self.lines.append((level, event, fields)),
            stepped=lambda step, result, took_s: self.steps.append((step, result)),
            sleep=self.clock.sleep,
        )

    async def does(self, wanted: Wanted) -> Progress:
        """The update from its begin to its end; what is written of it then."""
        async with asyncio.TaskGroup() as tasks:
            begun = await self.conductor(tasks).begin(wanted)
            assert isinstance(begun, Begun), begun
        return self.progress

    async def refuses(self, wanted: Wanted) -> Refused:
        async with asyncio.TaskGroup() as tasks:
            refused = await self.conductor(tasks).begin(wanted)
        assert isinstance(refused, Refused), refused
        return refused

    @property
    def progress(self) -> Progress:
        assert self.log.view is not None and self.log.view.table.update is not None
        return self.log.view.table.update

    def weights(self) -> dict[str, int]:
        assert self.log.view is not None
        return self.log.view.table.weights

    # The ports.

    async def ask(self, key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float) -> Answer:
        await asyncio.sleep(0)
        engine = self.engines.get(key)
        if engine is None or engine.down:
            return Answer(0, detail=f"cannot connect to {key}", reached=False)
        answer = engine.answer(request)
        if not answer.status:
            await self.clock.sleep(timeout_s)
            return Answer(0, detail=answer.detail or f"no answer within {timeout_s:.3g} s")
        return answer

    def order(self, key: str, action: Action, by: str, for_s: float) -> bool:
        self.orders.append((key, action, by))
        return self.fleet.override(Scope.NODE, key, action, self.clock.now, by, for_s) is not None

    def outlines(self) -> list[TableView]:
        return [] if self.log.view is None else [outline(self.log.view)]

    def standing(self, service: str) -> TableView | None:
        assert service == NAME
        return self.log.view

    async def submit(self, update: Update) -> Accepted | Refused:
        await asyncio.sleep(0)
        refused = Refused("unavailable", "the log is away") if self.log.away else self.log.refuse(update)
        if refused is not None:
            return refused
        table = None if self.log.view is None else self.log.view.table
        number = 0 if self.log.view is None else self.log.view.version
        made = revise(table, self.policy, number, update, int((EPOCH_S + self.clock.now) * 1e6), lambda: "r1")
        return self.log.put(made, "update", "") if isinstance(made, Table) else made

    async def change(
        self,
        service: str,
        revise: Callable[[Table], Table | Refused],
        by: str,
        why: str,
        evidence: str = "",
        *,
        begin: bool = False,
    ) -> Accepted | Refused:
        await asyncio.sleep(0)
        if self.log.away:
            return Refused("unavailable", "the log is away")
        made = revise(Table(service) if self.log.view is None else self.log.view.table)
        return self.log.put(made, why, evidence) if isinstance(made, Table) else made


def policy(*endpoints: Endpoint, **changes: Any) -> Service:
    return replace(
        Service(
            name=NAME,
            models=("m", "tiny", "l1"),
            endpoints=endpoints,
            breakers=Breakers(node=NodeBreaker(min_closed_ratio=0.0, mode="shadow")),
            deadlines=Deadlines(total_s=Seconds(100)),
        ),
        **changes,
    )


def triton(count: int = 2, **changes: Any) -> tuple[Pod, list[TritonEngine]]:
    """A service of Tritons that serve version 1 of `m`; version 2 is on their disks."""
    engines = [TritonEngine({"m": {"1": " old"}, "other": {"1": ""}}, "m") for _ in range(count)]
    for engine in engines:
        engine.disk["m"]["2"] = " Paris"
    keys = [f"t{number}:80" for number in range(count)]
    made = policy(*(Endpoint(url=f"http://{key}", engine="triton") for key in keys), **changes)
    return Pod(made, dict(zip(keys, engines, strict=True))), engines


def vllm(count: int = 2, *, dev: bool = True, **changes: Any) -> tuple[Pod, list[VllmEngine]]:
    """A service of vLLMs that have adapter `l1` from /old."""
    engines = [VllmEngine(dev=dev) for _ in range(count)]
    for engine in engines:
        engine.adapters["l1"] = "/old"
        engine.texts |= {"/old": " old", "/new": " Paris"}
    keys = [f"v{number}:80" for number in range(count)]
    made = policy(*(Endpoint(url=f"http://{key}") for key in keys), **changes)
    return Pod(made, dict(zip(keys, engines, strict=True))), engines


RELOAD = Wanted(model="m", action="load", kind="repository", by="ann", canary=Canary(expect="Paris"))
ADAPTER = Wanted(model="l1", action="load", kind="adapter", path="/new", by="ann", canary=Canary(expect="Paris"))
SLEEP = Wanted(model="tiny", action="unload", kind="sleep", endpoints=("v1:80",), by="ann")
WAKE = replace(SLEEP, action="load", canary=Canary(expect="Paris"))


# Triton, in place.


async def test_triton_reloads_at_one_endpoint_after_the_other_and_the_old_goes_after_its_streams() -> None:
    pod, engines = triton()
    engines[0].streams["m", "1"] = 1
    pod.clock.between.append(lambda: engines[0].streams.clear() if pod.progress.step == "drain" else None)
    progress = await pod.does(RELOAD)
    assert (progress.phase, progress.why) == ("done", "")
    assert [engine.served["m"] for engine in engines] == [{"2": " Paris"}] * 2
    assert pod.orders == [
        ("t0:80", "open", "ann, model update u1"),
        ("t0:80", "close", "ann, model update u1"),
        ("t1:80", "open", "ann, model update u1"),
        ("t1:80", "close", "ann, model update u1"),
    ]
    assert [step.step for step in progress.steps if step.place == "t0:80"] == [
        *("look", "rest", "load", "ready", "cache", "canary", "weights", "drain")
    ]
    assert next(step for step in progress.steps if step.step == "canary").detail == "it answered ' Paris', version 2"
    assert pod.steps[-1] == ("all", "done") and ("canary", "done") in pod.steps
    assert pod.lines[-1][1] == "model_update_done"
    assert all(node.breaker.passes for node in pod.service.nodes.values())


async def test_the_endpoint_rests_until_its_canary_was_answered() -> None:
    pod, engines = triton()
    seen: list[bool] = []
    does = engines[0].does

    def watched(method: str, path: str, said: dict[str, Any]) -> Answer:
        if "generate" in path or "load" in path:
            seen.append(pod.node("t0:80").breaker.passes)
        return does(method, path, said)

    engines[0].does = watched  # type: ignore[method-assign]
    await pod.does(RELOAD)
    assert seen == [False, False]


async def test_alone_triton_reloads_under_its_traffic() -> None:
    pod, engines = triton(1)
    progress = await pod.does(RELOAD)
    assert (progress.phase, pod.orders) == ("done", [])
    assert engines[0].served["m"] == {"2": " Paris"}


async def test_one_version_may_be_named() -> None:
    pod, engines = triton(1)
    engines[0].disk["m"]["3"] = " later"
    progress = await pod.does(replace(RELOAD, model_version="2"))
    assert (progress.phase, engines[0].served["m"]) == ("done", {"2": " Paris"})
    assert engines[0].said("versions/2/generate_stream")


BAD_LOAD = told(
    {"error": "load failed for model 'm': version 2 is at UNAVAILABLE state: RuntimeError: no weights"}, 400
)


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        pytest.param("/load", BAD_LOAD, "load at t0:80 failed: 400: load failed for model 'm'", id="load fails"),
        pytest.param("/load", None, "load at t0:80 failed: no answer within 600 s", id="load hangs"),
        pytest.param(
            "/m/ready", told({"error": "Model version not ready"}, 400), "ready at t0:80 failed: not", id="never ready"
        ),
        pytest.param("generate", HANGS, "canary at t0:80 failed: no answer within 60 s", id="canary hangs"),
        pytest.param(
            "generate",
            told({"error": "Stub process 'm_0_0' is not healthy."}, 400),
            "canary at t0:80 failed: server_error",
            id="canary breaks",
        ),
        pytest.param(
            "generate",
            Answer(200, b'data: {"model_version":"2","text_output":" Rome"}\n\n', b"text/event-stream"),
            "canary at t0:80 failed: wrong answer: ' Rome' does not contain 'Paris'",
            id="wrong answer",
        ),
    ],
)
async def test_triton_broken_at_a_step_serves_the_old_version(path: str, answer: Answer | None, why: str) -> None:
    pod, engines = triton()
    if answer is None:
        engines[0].silent.add(path)
    else:
        engines[0].break_at(path, answer, times=1 if path == "/load" else 1_000_000)
    progress = await pod.does(RELOAD)
    assert progress.why.startswith(why)
    assert progress.phase == "failed", progress
    assert [engine.served["m"] for engine in engines] == [{"1": " old"}] * 2
    assert all(node.breaker.passes for node in pod.service.nodes.values())
    assert pod.lines[-1][:2] == ("error", "model_update_failed") and pod.lines[-1][2]["why"] == progress.why
    assert not engines[1].said("/load")


async def test_a_triton_that_hangs_at_its_load_stays_out_since_nobody_knows_what_it_has() -> None:
    pod, engines = triton()
    engines[0].break_at("/load", HANGS)
    progress = await pod.does(RELOAD)
    assert progress.phase == "stuck" and progress.why.startswith("load at t0:80 failed: no answer within 600 s; and")
    assert not pod.node("t0:80").breaker.passes and pod.node("t1:80").breaker.passes
    assert engines[1].served["m"] == {"1": " old"}


async def test_a_second_triton_that_fails_takes_the_first_one_back() -> None:
    pod, engines = triton()
    engines[1].break_at("/load", BAD_LOAD)
    progress = await pod.does(RELOAD)
    assert progress.phase == "failed" and "load at t1:80" in progress.why
    assert [engine.served["m"] for engine in engines] == [{"1": " old"}] * 2
    assert [order[:2] for order in pod.orders] == [
        *(("t0:80", "open"), ("t0:80", "close"), ("t1:80", "open")),
        *(("t1:80", "close"), ("t0:80", "open"), ("t0:80", "close")),
    ]


async def test_what_was_loaded_under_its_own_number_cannot_come_back_and_stays_out() -> None:
    pod, engines = triton()
    engines[0].disk["m"] = {"1": " wrong"}
    progress = await pod.does(RELOAD)
    assert progress.phase == "stuck"
    assert "loaded again under the same number" in progress.why
    assert not pod.node("t0:80").breaker.passes and pod.node("t1:80").breaker.passes
    assert engines[1].served["m"] == {"1": " old"}


async def test_an_old_version_that_does_not_drain_serves_its_streams_on() -> None:
    pod, engines = triton(1)
    engines[0].streams["m", "1"] = 1
    progress = await pod.does(RELOAD)
    assert progress.phase == "unfinished"
    assert progress.why == "drain at t0:80 failed: not within 130 s: version 1 is UNLOADING"
    assert engines[0].served["m"] == {"2": " Paris"} and not engines[0].said("/unload")


async def test_triton_unloads_when_the_index_says_so() -> None:
    pod, engines = triton()
    wanted = replace(RELOAD, action="unload", endpoints=("t0:80",), canary=Canary())
    engines[0].streams["m", "1"] = 1
    pod.clock.between.append(lambda: engines[0].streams.clear() if pod.clock.now > 1010 else None)
    progress = await pod.does(wanted)
    assert (progress.phase, engines[0].served["m"]) == ("done", {})
    assert pod.clock.now > 1010
    refused = await pod.refuses(replace(wanted, endpoints=()))
    assert refused.code == "conflict" and "nobody of chat would serve m" in refused.message
    engines[1].break_at("/unload", told({"error": "no"}, 500))
    progress = await pod.does(replace(wanted, endpoints=("t1:80",), anyway=True))
    assert (progress.phase, progress.why) == ("failed", "unload at t1:80 failed: 500: no")
    assert engines[1].served["m"] == {"1": " old"}


async def test_a_model_that_clients_call_otherwise_serves_again_once_it_is_loaded() -> None:
    pod, _ = triton()
    [fresh] = [replace(endpoint, engine_model="m") for endpoint in pod.policy.endpoints[:1]]
    pod.policy = replace(pod.policy, endpoints=(fresh, pod.policy.endpoints[1]))
    pod.fleet.apply(Snapshot(version=2, services=(pod.policy,)), pod.clock.now)
    pod.node("t0:80").models = pod.node("t1:80").models = frozenset()  # none was ready when they were last asked
    assert (await pod.does(RELOAD)).phase == "done"
    assert (pod.node("t0:80").models, pod.node("t1:80").models) == (None, frozenset({"m"}))


async def test_a_model_that_is_not_in_the_repository() -> None:
    pod, _ = triton(1)
    progress = await pod.does(replace(RELOAD, model="nope", service=NAME))
    assert progress.why == "load at t0:80 failed: 500: failed to load 'nope', failed to poll from model repository"
    assert progress.phase == "failed"


# vLLM, adapters.


async def test_an_adapter_takes_the_place_of_another_after_its_streams_and_nothing_is_left_in_a_cache() -> None:
    pod, engines = vllm()
    pod.node("v0:80").in_flight = 1
    engines[0].running = 1

    def ends() -> None:
        if pod.clock.now > 1005:
            pod.node("v0:80").in_flight = 0
        if pod.clock.now > 1010:
            assert engines[0].adapters["l1"] == "/old"
            engines[0].running = 0

    pod.clock.between.append(lambda: ends() if engines[0].running else None)
    progress = await pod.does(ADAPTER)
    assert (progress.phase, progress.why) == ("done", "")
    assert [engine.adapters["l1"] for engine in engines] == ["/new"] * 2
    assert [engine.resets for engine in engines] == [1, 1]


async def test_a_new_adapter_needs_nobody_to_make_room() -> None:
    pod, engines = vllm(1)
    pod.node("v0:80").models = frozenset({"tiny", "l1"})
    progress = await pod.does(replace(ADAPTER, model="l2", service=NAME))
    assert (progress.phase, pod.orders, engines[0].resets) == ("done", [], 0)
    assert engines[0].adapters == {"l1": "/old", "l2": "/new"}
    assert pod.node("v0:80").models == frozenset({"tiny", "l1", "l2"})
    progress = await pod.does(Wanted(model="l2", action="unload", kind="adapter", service=NAME))
    assert (progress.phase, engines[0].adapters) == ("done", {"l1": "/old"})
    assert pod.node("v0:80").models == frozenset({"tiny", "l1"})
    assert (await pod.does(Wanted(model="l2", action="unload", kind="adapter", service=NAME))).phase == "done"
    engines[0].texts["/new"] = " Rome"
    assert (await pod.does(replace(ADAPTER, model="l2", service=NAME))).phase == "failed"
    assert pod.node("v0:80").models == frozenset({"tiny", "l1"}), "clients are sent to an adapter that is gone"


MISSING = error(404, "NotFoundError", "Loading lora l1 failed: No adapter found for /new")
RANK = error(500, "InternalServerError", "LoRA rank 64 is greater than max_lora_rank 16.")
WRONG = told({"model": "l1", "choices": [{"text": " Rome", "finish_reason": "length"}]})


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        pytest.param("/v1/load", MISSING, "load at v0:80 failed: 404: Loading lora l1 failed: No", id="load fails"),
        pytest.param("/v1/load", RANK, "load at v0:80 failed: 500: LoRA rank 64 is greater", id="rank"),
        pytest.param("/v1/load", HANGS, "load at v0:80 failed: no answer within 600 s", id="load hangs"),
        pytest.param("/reset", told({"success": False}), "cache at v0:80 failed: not within 30 s", id="cache in use"),
        pytest.param("/v1/completions", HANGS, "canary at v0:80 failed: no answer within 60 s", id="canary hangs"),
        pytest.param("/v1/completions", WRONG, "canary at v0:80 failed: wrong answer: ' Rome'", id="wrong answer"),
        pytest.param(
            "/v1/completions",
            told({"model": "tiny", "choices": [{"text": " Paris", "finish_reason": "length"}]}),
            "canary at v0:80 failed: wrong answer: 'tiny' answered",
            id="another model answers",
        ),
        pytest.param(
            "/v1/completions",
            told({"model": "l1", "choices": [{"text": "", "finish_reason": "abort"}]}),
            "canary at v0:80 failed: aborted",
            id="aborted",
        ),
    ],
)
async def test_vllm_broken_at_a_step_serves_the_old_adapter(path: str, answer: Answer, why: str) -> None:
    pod, engines = vllm()
    engines[0].break_at(path, answer, times=1_000_000 if "comp" in path else 1 if "load" in path else 121)
    progress = await pod.does(ADAPTER)
    assert progress.why.startswith(why)
    assert progress.phase == "failed", progress
    assert [engine.adapters["l1"] for engine in engines] == ["/old"] * 2
    assert all(node.breaker.passes for node in pod.service.nodes.values())


async def test_streams_that_do_not_end_keep_their_adapter() -> None:
    pod, engines = vllm()
    engines[0].running = 1
    progress = await pod.does(ADAPTER)
    assert progress.why == "drain at v0:80 failed: not within 130 s: the engine has 1 running and 0 waiting"
    assert (progress.phase, engines[0].adapters["l1"]) == ("failed", "/old")
    assert pod.node("v0:80").breaker.passes


async def test_without_development_mode_another_salt_keeps_the_old_cache_from_serving() -> None:
    pod, engines = vllm(dev=False, cache_salt="tenant")
    progress = await pod.does(ADAPTER)
    assert progress.phase == "done"
    assert pod.log.view is not None
    assert pod.log.view.table.salt_generation == 2, "the second has computed with the first one's what the old one says"
    assert all(f'"cache_salt": "{progress.id}"' in body for engine in engines for body in engine.canaries)
    pod, engines = vllm(dev=False)
    progress = await pod.does(ADAPTER)
    assert (progress.phase, pod.orders) == ("failed", [])
    assert "l1 is loaded at v0:80, which cannot reset its prefix cache" in progress.why
    assert [engine.adapters["l1"] for engine in engines] == ["/old"] * 2
    assert (await pod.does(replace(ADAPTER, model="l2", service=NAME))).phase == "done"


@pytest.mark.parametrize("salt", ["off", "tenant"])
async def test_in_rotation_no_stream_keeps_the_old_ones_cache(salt: str) -> None:
    pod, engines = vllm(1, cache_salt=salt)
    engines[0].running = 50
    progress = await pod.does(replace(ADAPTER, rest=False))
    assert (progress.phase, progress.why) == ("done", "")
    assert (engines[0].resets, pod.log.view and pod.log.view.table.salt_generation) == (
        (1, 0) if salt == "off" else (0, 1)
    )


async def test_an_adapter_where_adapters_cannot_be_loaded_or_the_name_is_the_base_models() -> None:
    pod, engines = vllm(1)
    engines[0].lora = False
    progress = await pod.does(replace(ADAPTER, model="l2", service=NAME))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in progress.why and progress.phase == "failed"
    progress = await pod.does(replace(ADAPTER, model="tiny"))
    assert progress.why == "look at v0:80 failed: 'tiny' is a base model there, and no adapter"


# vLLM, sleep.


async def test_an_endpoint_goes_to_sleep_when_its_streams_have_ended_and_comes_back_awake() -> None:
    pod, engines = vllm()
    engines[1].running = 1
    pod.clock.between.append(lambda: setattr(engines[1], "running", 0) if pod.clock.now > 1020 else None)
    progress = await pod.does(SLEEP)
    assert (progress.phase, engines[1].asleep) == ("done", True)
    assert pod.clock.now > 1020
    assert not pod.node("v1:80").breaker.passes and pod.node("v0:80").breaker.passes
    progress = await pod.does(WAKE)
    assert (progress.phase, engines[1].asleep, engines[1].resets) == ("done", False, 1)
    assert pod.node("v1:80").breaker.passes


async def test_the_last_that_is_awake_does_not_go_to_sleep() -> None:
    pod, engines = vllm()
    for wanted in (replace(SLEEP, endpoints=()), replace(SLEEP, endpoints=("v0:80", "v1:80"))):
        assert "nobody of chat would be awake" in (await pod.refuses(wanted)).message
    engines[1].break_at("/sleep", error(500, "InternalServerError", "no"))
    progress = await pod.does(SLEEP)
    assert (progress.phase, progress.why) == ("failed", "unload at v1:80 failed: 500: no")
    assert pod.node("v1:80").breaker.passes


@pytest.mark.parametrize(
    ("path", "answer", "why", "asleep"),
    [
        ("/wake_up", error(500, "InternalServerError", "no"), "load at v1:80 failed: 500: no", True),
        ("/v1/completions", HANGS, "canary at v1:80 failed: no answer within 60 s", True),
        ("/v1/completions", WRONG, "canary at v1:80 failed: wrong answer", True),
    ],
)
async def test_who_does_not_wake_up_well_stays_out(path: str, answer: Answer, why: str, asleep: bool) -> None:
    pod, engines = vllm()
    await pod.does(SLEEP)
    engines[1].break_at(path, answer)
    progress = await pod.does(WAKE)
    assert progress.why.startswith(why) and progress.phase == "failed"
    assert engines[1].asleep is asleep and not pod.node("v1:80").breaker.passes


async def test_sleep_needs_development_mode() -> None:
    pod, _ = vllm(dev=False)
    progress = await pod.does(SLEEP)
    assert "VLLM_SERVER_DEV_MODE=1" in progress.why and (progress.phase, pod.orders) == ("failed", [])


# A version of its own.


def beside(old: Engine, new: Engine, old_kind: dict[str, Any], new_kind: dict[str, Any]) -> Pod:
    """v1 at `o:80` with all traffic, v2 at `n:80` with none."""
    made = policy(
        Endpoint(url="http://o:80", version="v1", **old_kind),
        Endpoint(url="http://n:80", version="v2", **new_kind),
        split={"v1": 1.0, "v2": 0.0},
    )
    return Pod(made, {"o:80": old, "n:80": new})


GATEWAY = {"engine": "deepspeed", "front": "gateway", "engine_model": "deployed"}
TRITON = {"engine": "triton", "engine_model": "m"}
VLLM: dict[str, Any] = {}
MAKES: dict[str, tuple[Callable[[str], Engine], dict[str, Any], str]] = {
    "vllm": (lambda text: vllm_of(text), VLLM, "/v1/completions"),
    "triton": (lambda text: TritonEngine({"m": {"1": text}}, "m"), TRITON, "generate"),
    "mii": (lambda text: MiiEngine("deployed", text), GATEWAY, "/mii/"),
}
MOVE = Wanted(
    model="tiny", action="load", kind="version", version="v2", service=NAME, by="ann", canary=Canary(expect="Paris")
)


def vllm_of(text: str) -> VllmEngine:
    engine = VllmEngine()
    engine.texts["/base"] = text
    return engine


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", MAKES)
async def test_a_version_gets_the_traffic_and_the_old_one_goes(kind: str, leaves: bool) -> None:
    make, fields, _ = MAKES[kind]
    old, new = make(" old"), make(" Paris")
    pod = beside(old, new, fields, fields)
    how = {"vllm": "sleep", "triton": "unload", "mii": "terminate"}[kind] if leaves else "leave"
    pod.node("o:80").in_flight = 2
    pod.clock.between.append(lambda: setattr(pod.node("o:80"), "in_flight", 0) if pod.clock.now > 1030 else None)
    progress = await pod.does(replace(MOVE, leaving=how))
    assert (progress.phase, progress.why) == ("done", "")
    assert pod.weights() == {"v1": 0, "v2": PARTS}
    assert [step.step for step in progress.steps] == [
        *("ready", "cache", "canary", "weights", "drain"),
        *(("unload",) if leaves else ()),
    ]
    assert pod.clock.now > 1030
    if isinstance(old, VllmEngine):
        assert old.asleep is leaves
    elif isinstance(old, TritonEngine):
        assert (old.served["m"] == {}) is leaves
    else:
        assert old.down is leaves


@pytest.mark.parametrize("how", ["never ready", "canary hangs", "wrong answer", "desk refuses", "old will not drain"])
@pytest.mark.parametrize("kind", MAKES)
async def test_a_version_broken_at_a_step_leaves_the_old_one_with_the_traffic(kind: str, how: str) -> None:
    make, fields, path = MAKES[kind]
    old, new = make(" old"), make(" Rome" if how == "wrong answer" else " Paris")
    pod = beside(old, new, fields, fields)
    step = how
    match how:
        case "never ready":
            for ready in ("/ready", "/v1/models", "/healthz"):
                new.break_at(ready, told({"error": "loading"}, 503))
            step = "ready at n:80 failed: not within 120 s"
        case "canary hangs":
            new.break_at(path, HANGS)
            step = "canary at n:80 failed: no answer within 60 s"
        case "wrong answer":
            step = "canary at n:80 failed: wrong answer: ' Rome' does not contain 'Paris'"
        case "desk refuses":
            pod.log.refuse = lambda update: Refused("conflict", "schemas differ") if update.weight is not None else None
            step = "weights failed: conflict: schemas differ"
        case _:
            pod.node("o:80").in_flight = 1
            step = "drain failed: not within 130 s: o:80: 1 of its requests are under way"
    progress = await pod.does(MOVE)
    assert progress.why.startswith(step)
    assert progress.phase == "failed", progress
    weights = pod.weights()
    assert not weights or weights == {"v1": PARTS, "v2": 0}
    assert pod.service.split == (("v1", 10_000.0 if weights else 1.0),)


async def test_an_old_one_that_does_not_unload_has_no_traffic_all_the_same() -> None:
    old, new = MiiEngine("deployed", " old"), MiiEngine("deployed")
    pod = beside(old, new, GATEWAY, GATEWAY)
    old.break_at("/terminate", told({"message": "Internal Server Error"}, 500))
    progress = await pod.does(replace(MOVE, leaving="terminate"))
    assert (progress.phase, progress.why) == ("unfinished", "unload at o:80 failed: 500: Internal Server Error")
    assert pod.weights() == {"v1": 0, "v2": PARTS}


async def test_without_a_gauge_other_sidecars_streams_are_given_their_time() -> None:
    pod = beside(MiiEngine("deployed", " old"), MiiEngine("deployed"), GATEWAY, GATEWAY)
    pod.members = 2
    began = pod.clock.now
    progress = await pod.does(MOVE)
    assert progress.phase == "done"
    assert 100.0 <= pod.clock.now - began < 102.0


async def test_endpoints_that_nobody_knew_are_put_into_the_table_and_taken_out_again() -> None:
    for text, phase in ((" Paris", "done"), (" Rome", "failed")):
        pod = Pod(policy(Endpoint(url="http://o:80")), {"o:80": vllm_of(" old"), "n:80": vllm_of(text)})
        wanted = replace(MOVE, endpoints=("http://n:80",), engine="vllm")
        assert "name its engine" in (await pod.refuses(replace(wanted, engine=""))).message
        progress = await pod.does(wanted)
        assert progress.phase == phase
        assert (EndpointKey("n:80") in pod.service.nodes) is (phase == "done")
        assert pod.weights() == ({"v1": 0, "v2": PARTS} if phase == "done" else {"v1": PARTS})


async def test_new_endpoints_are_spoken_to_as_they_are_said_to_be() -> None:
    pod = Pod(policy(Endpoint(url="http://o:80")), {"o:80": vllm_of(" old"), "n:80": MiiEngine("deployed")})
    wanted = replace(
        MOVE, endpoints=("http://n:80",), engine="deepspeed", front="gateway", engine_model="deployed", leaving="sleep"
    )
    progress = await pod.does(wanted)
    assert (progress.phase, pod.weights()) == ("done", {"v1": 0, "v2": PARTS})
    assert pod.engines["n:80"].asked[-1] == "POST /mii/deployed"
    old = pod.engines["o:80"]
    assert isinstance(old, VllmEngine) and old.asleep


async def test_a_version_that_leaves() -> None:
    pod = beside(vllm_of(" old"), vllm_of(" Paris"), VLLM, VLLM)
    await pod.does(replace(MOVE, weight=0.5))
    assert pod.weights() == {"v1": 5000, "v2": 5000}
    wanted = replace(MOVE, action="unload", weight=1.0, leaving="sleep")
    progress = await pod.does(wanted)
    assert (progress.phase, pod.weights()) == ("done", {"v1": PARTS, "v2": 0})
    engine = pod.engines["n:80"]
    assert isinstance(engine, VllmEngine) and engine.asleep
    assert "no other version" in (await pod.refuses(replace(wanted, version="v1"))).message


@pytest.mark.parametrize(("phase", "ends"), [("promoted", "done"), ("failed", "failed")])
async def test_a_plan_is_waited_for(phase: str, ends: str) -> None:
    pod = beside(vllm_of(" old"), vllm_of(" Paris"), VLLM, VLLM)

    def judges() -> None:
        table = pod.log.view.table if pod.log.view is not None else None
        if table is None or table.rollout is None or not table.rollout.live or pod.clock.now < 2000:
            return
        weights = {"v1": 0, "v2": PARTS} if phase == "promoted" else {"v1": PARTS, "v2": 0}
        versions = tuple(replace(each, weight=weights[each.name]) for each in table.versions)
        rollout = replace(table.rollout, phase=phase, evidence="35 % failed")
        pod.log.put(replace(table, versions=versions, rollout=rollout), phase, "")

    pod.clock.between.append(judges)
    plan = Plan("v1", (Step(1000, 1.0, 1), Step(PARTS, 0.0, 1)))
    progress = await pod.does(replace(MOVE, plan=plan))
    assert progress.phase == ends
    assert pod.weights() == ({"v1": 0, "v2": PARTS} if ends == "done" else {"v1": PARTS, "v2": 0})
    assert ("35 % failed" in progress.why) is (ends == "failed")


# Who is at it.


async def test_a_second_update_of_a_service_is_refused_with_who_and_since_when() -> None:
    log = Log()
    pod, _ = triton()
    other = Pod(pod.policy, pod.engines, log, "pod-2")
    pod.log = log
    log.pods.append(pod)
    refusals: list[Refused] = []

    async def asks(updates: HotUpdates, again: HotUpdates) -> None:
        for conductor in (updates, again):
            refused = await conductor.begin(replace(RELOAD, by="bob"))
            assert isinstance(refused, Refused)
            refusals.append(refused)

    async with asyncio.TaskGroup() as tasks:
        updates, there = pod.conductor(tasks), other.conductor(tasks)
        assert isinstance(await updates.begin(RELOAD), Begun)
        other.clock.now = pod.clock.now + 7
        await asks(updates, there)
    assert [each.code for each in refusals] == ["conflict"] * 2
    assert refusals[0].message == "ann is at it: load of m"
    assert refusals[1].message.startswith("ann is at it: load of m, since 7 s, on pod-1, step ")
    assert pod.progress.phase == "done"
    assert (await other.does(replace(RELOAD, by="bob"))).by == "bob"


async def test_with_the_log_away_nothing_begins() -> None:
    pod, engines = triton()
    pod.log.away = True
    assert (await pod.refuses(RELOAD)).code == "unavailable"
    assert engines[0].asked == []
    pod.log.away = False
    assert (await pod.does(RELOAD)).phase == "done"


async def test_a_log_that_goes_away_meanwhile_is_told_the_end() -> None:
    pod, _ = triton(1)

    def goes() -> None:
        pod.log.away = pod.clock.now < 1060

    async with asyncio.TaskGroup() as tasks:
        assert isinstance(await pod.conductor(tasks).begin(RELOAD), Begun)
        pod.log.away = True
        pod.clock.between.append(goes)
    assert (pod.progress.phase, pod.progress.step) == ("done", "")
    assert ("warning", "model_update_untold") in [line[:2] for line in pod.lines]


async def test_what_died_in_the_middle_is_told_as_interrupted_and_may_be_asked_again() -> None:
    pod, engines = triton()
    engines[0].break_at("/load", Answer(0, detail="x"))

    def dies() -> None:
        raise Killed

    pod.clock.between.append(dies)
    with pytest.raises(BaseExceptionGroup):
        await pod.does(RELOAD)
    pod.clock.between.clear()
    engines[0].broken.clear()
    assert (pod.progress.phase, pod.progress.step, pod.progress.place) == ("running", "load", "t0:80")
    assert engines[0].served["m"] == {"1": " old"} == engines[1].served["m"]
    other = Pod(pod.policy, pod.engines, pod.log, "pod-2")
    async with asyncio.TaskGroup() as tasks:
        # Who has its name knows that it is not at it; the others wait for its word.
        assert pod.conductor(tasks).views() == [UpdateView(NAME, pod.progress, True)]
        there = other.conductor(tasks)
        other.clock.now = 1010.0  # nothing was written since the load began
        assert not there.views()[0].interrupted
        other.clock.now += LEASE_S + 1.0
        assert there.views()[0].interrupted
    assert not pod.node("t0:80").breaker.passes, "nobody looked at what it loaded"
    assert (await pod.does(RELOAD)).phase == "done"
    assert pod.node("t0:80").breaker.passes


async def test_a_beat_keeps_the_word_good() -> None:
    pod, _ = triton(1)
    async with asyncio.TaskGroup() as tasks:
        updates = pod.conductor(tasks)
        await updates.begin(RELOAD)
        until_us = pod.progress.until_us
        pod.clock.now += 30.0
        await updates.beat()
        assert pod.progress.until_us >= until_us + 30_000_000
    await updates.beat()
    assert pod.progress.phase == "done"


async def test_who_is_stopped_says_what_it_leaves() -> None:
    pod, engines = triton()
    engines[0].break_at("/load", HANGS)
    async with asyncio.TaskGroup() as tasks:
        updates = pod.conductor(tasks)
        pod.clock.between.append(updates.stop)
        await updates.begin(RELOAD)
    assert ("warning", "model_update_interrupted") in [line[:2] for line in pod.lines]
    assert (pod.progress.phase, pod.progress.step) == ("running", "load")


async def test_a_fault_of_ours_undoes_what_was_done_and_hurts_nobody() -> None:
    pod, engines = triton()

    def crashes(method: str, path: str, said: dict[str, Any]) -> Answer:
        if "generate" in path:
            raise RuntimeError("a bug")
        return TritonEngine.does(engines[0], method, path, said)

    engines[0].does = crashes  # type: ignore[method-assign]
    progress = await pod.does(RELOAD)
    assert progress.phase == "failed" and "a fault of this sidecar: RuntimeError('a bug')" in progress.why
    assert engines[0].served["m"] == {"1": " old"}


async def test_an_endpoint_that_leaves_the_policy_meanwhile() -> None:
    pod, engines = triton()
    gone = replace(pod.policy, endpoints=pod.policy.endpoints[1:])

    def leaves(method: str, path: str, said: dict[str, Any]) -> Answer:
        if path.endswith("/load"):
            pod.policy = gone
            pod.fleet.apply(Snapshot(version=2, services=(gone,)), pod.clock.now)
        return TritonEngine.does(engines[0], method, path, said)

    engines[0].does = leaves  # type: ignore[method-assign]
    progress = await pod.does(RELOAD)
    assert progress.phase == "stuck"
    assert "t0:80 is no endpoint of chat any more" in progress.why


async def test_who_asks_for_what_is_not_there() -> None:
    pod, _ = triton()
    assert "there is no service that serves 'x'" in (await pod.refuses(replace(RELOAD, model="x"))).message
    assert "there is no service 'x'" in (await pod.refuses(replace(RELOAD, service="x"))).message


def test_what_engines_are_told_is_json() -> None:
    assert json.loads(told({"a": 1}).body) == {"a": 1}


# Once for real: a sidecar, its admin port and sockets.


@dataclass
class Traffic:
    """Clients who ask one after the other, as long as it lasts; what they got."""

    whole: int = 0
    broken: list[bytes] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    async def ask(self, port: int, stop: asyncio.Event) -> None:
        body = b'{"model":"m","prompt":"x","stream":true,"max_tokens":20}'
        while not stop.is_set():
            async with connect(port) as client:
                asked = request(
                    b"/v1/completions", method=b"POST", headers=(b"Content-Type: application/json",), body=body
                )
                message = await client.ask(asked, b"POST")
            if message.status == 200 and message.body.rstrip().endswith(b"data: [DONE]"):
                self.whole += 1
                self.texts |= {text for text in ("old", "Paris") if text.encode() in message.body}
            else:
                self.broken.append(message.body)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_reload_under_streams_breaks_none(fails: bool) -> None:
    engines = [TritonEngine({"m": {"1": "old"}}, "m") for _ in range(2)]
    for engine in engines:
        engine.disk["m"]["2"] = "Rome" if fails else "Paris"
    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(listening(engine, words=20)) for engine in engines]
        made = default(
            *(Endpoint(url=f"http://127.0.0.1:{port}", engine="triton") for port in ports), name="chat", models=("m",)
        )
        ours = await stack.enter_async_context(sidecar(made, admin=Listen("127.0.0.1", 0)))
        traffic, stop = Traffic(), asyncio.Event()
        admin = f"127.0.0.1:{ours.running.admin_port}"
        async with asyncio.TaskGroup() as clients:
            for _ in range(20):
                clients.create_task(traffic.ask(ours.port, stop))
            await asyncio.sleep(0.3)
            command = ("model", "load", "m", "--service", "chat", "--expect", "Paris", "--admin", admin)
            code = await asyncio.to_thread(main, [*command, "--timeout", "drain=20s", "--by", "ann"])
            await asyncio.sleep(0.3)
            stop.set()
        assert code == (1 if fails else 0)
        assert traffic.broken == [] and traffic.whole > 40
        assert traffic.texts == ({"old"} if fails else {"old", "Paris"})
        assert [engine.served["m"] for engine in engines] == [{"1": "old"} if fails else {"2": "Paris"}] * 2
        assert ours.running.models is not None
        (view,) = ours.running.models.views()
        assert (view.progress.phase, view.progress.by) == ("failed" if fails else "done", "ann")
        text, _ = await ours.running.exposition()
        done = b'sidecar_model_update_steps_total{step="all",result="%b"} 1' % (b"failed" if fails else b"done")
        assert done in text


@pytest.mark.parametrize("make", [triton, vllm])
async def test_one_that_cannot_go_back_keeps_no_other_from_it(make: Callable[[int], tuple[Pod, list[Any]]]) -> None:
    pod, engines = make(3)
    last = list(pod.engines)[2]

    def watched() -> None:
        engines[2].down = engines[2].down or (pod.progress.step, pod.progress.place) == ("canary", last)

    engines[2].break_at("generate", HANGS)
    engines[2].break_at("/v1/completions", HANGS)
    pod.clock.between.append(watched)
    progress = await pod.does(replace(RELOAD if make is triton else ADAPTER, deadlines={"load": 30.0}))
    assert progress.phase == "stuck" and "revert at" in progress.why and "cannot connect" in progress.why
    assert [node.key for node in pod.service.nodes.values() if node.breaker.held_open] == [last]
    if make is triton:
        assert [engine.served["m"] for engine in engines[:2]] == [{"1": " old"}] * 2
    else:
        assert [engine.adapters["l1"] for engine in engines[:2]] == ["/old"] * 2


async def test_an_engine_that_was_away_for_a_while_goes_back() -> None:
    pod, engines = vllm()
    engines[0].break_at("/v1/completions", HANGS)
    away: list[float] = []

    def watched() -> None:
        if pod.progress.step == "canary" and not away:
            away.append(pod.clock.now)
        engines[0].down = bool(away) and pod.clock.now < away[0] + 100.0

    pod.clock.between.append(watched)
    progress = await pod.does(ADAPTER)
    assert (progress.phase, engines[0].adapters["l1"]) == ("failed", "/old")
    assert all(node.breaker.passes for node in pod.service.nodes.values())


async def test_an_endpoint_that_another_service_has_alone_does_not_rest() -> None:
    pod, engines = triton()
    other = replace(pod.policy, name="alone", models=("other",), endpoints=pod.policy.endpoints[:1])
    pod.fleet.put(other, pod.clock.now)
    progress = await pod.does(RELOAD)
    assert (progress.phase, pod.orders) == ("failed", [])
    assert "rest at t0:80 failed: not within 5 s: nobody else of alone may serve" in progress.why
    assert (await pod.does(replace(RELOAD, rest=False))).phase == "done"
    assert [engine.served["m"] for engine in engines] == [{"2": " Paris"}] * 2


async def test_a_service_that_sleeps_is_woken() -> None:
    pod, _ = triton()
    asleep = pod.fleet.services.pop(NAME)
    pod.fleet.wake = lambda name: pod.fleet.services.update({name: asleep})
    assert (await pod.does(replace(RELOAD, service=NAME))).phase == "done"


# Others who say something meanwhile.


@pytest.mark.parametrize("when", ["before", "while it loads"])
async def test_whom_an_operator_holds_out_of_rotation_stays_out(when: str) -> None:
    pod, engines = triton(3)

    def holds() -> None:
        pod.fleet.override(Scope.NODE, "t0:80", "open", pod.clock.now, "bob")

    if when == "before":
        holds()
    does = engines[0].does

    def watched(method: str, path: str, said: dict[str, Any]) -> Answer:
        if path.endswith("/load"):
            holds()
        return does(method, path, said)

    engines[0].does = watched  # type: ignore[method-assign]
    progress = await pod.does(RELOAD)
    assert progress.phase == "done"
    assert [engine.served["m"] for engine in engines] == [{"2": " Paris"}] * 3
    breaker = pod.node("t0:80").breaker
    assert (breaker.held_open, breaker.by) == (True, "bob")
    assert "it stays out of rotation by bob" in [step.detail for step in progress.steps]


async def test_who_could_not_renew_its_word_stops_where_another_update_was_begun() -> None:
    pod, engines = triton()
    engines[0].streams["m", "1"] = 1

    def passes() -> None:
        if pod.log.away or pod.progress.step == "drain":
            pod.log.away = pod.clock.now < 1100.0
            if pod.clock.now > 1090.0:
                engines[0].streams.clear()
        if not pod.log.away and pod.clock.now >= 1100.0:
            assert pod.log.view is not None
            table = pod.log.view.table
            pod.log.put(replace(table, update=replace(pod.progress, id="u9", by="bob", on="pod-2")), "", "")

    pod.clock.between.append(passes)
    progress = await pod.does(RELOAD)
    assert (progress.id, progress.phase) == ("u9", "running")
    assert not engines[1].said("/load"), "it was told to load by somebody who was no longer to"
    assert pod.lines[-1][:2] == ("error", "model_update_superseded")
    assert pod.clock.now < 1150.0, "a second update can be asked here, too"


async def test_a_leader_that_cannot_reach_the_log_waits_with_its_next_step_and_goes_on() -> None:
    pod, engines = triton()
    loads: list[tuple[float, bool]] = []
    for engine in engines:
        does = engine.does

        def watched(method: str, path: str, said: dict[str, Any], does: Callable[..., Answer] = does) -> Answer:
            if path.endswith("/load"):
                loads.append((pod.clock.now, pod.log.away))
            return does(method, path, said)

        engine.does = watched  # type: ignore[method-assign]
    engines[0].streams["m", "1"] = 1

    def passes() -> None:
        if pod.log.away or pod.progress.step == "drain":
            pod.log.away = pod.clock.now < 1100.0
            if pod.clock.now > 1090.0:
                engines[0].streams.clear()

    pod.clock.between.append(passes)
    assert (await pod.does(RELOAD)).phase == "done"
    assert [away for _, away in loads] == [False, False]


@pytest.mark.parametrize("text", [" Paris", " Rome"])
async def test_an_answer_of_the_log_that_is_lost_lists_no_endpoint_twice_and_leaves_none(text: str) -> None:
    pod, _ = triton(1)
    pod.engines["n0:80"] = TritonEngine({"m": {"1": text}}, "m")
    submit = pod.submit
    lost: list[Update] = []

    async def loses(update: Update) -> Accepted | Refused:
        made = await submit(update)
        if update.endpoints is not None and not lost:
            lost.append(update)
            return Refused("unavailable", "it may have been done")
        return made

    pod.submit = loses  # type: ignore[method-assign]
    wanted = Wanted(
        model="m",
        action="load",
        kind="version",
        version="v2",
        engine="triton",
        endpoints=("http://n0:80",),
        canary=Canary(expect="Paris"),
    )
    progress = await pod.does(wanted)
    assert lost and progress.phase == ("done" if text == " Paris" else "failed")
    assert pod.log.view is not None
    version = pod.log.view.table.version("v2")
    assert (0 if version is None else len(version.endpoints)) == (text == " Paris")


async def test_weights_that_somebody_moved_meanwhile_are_not_taken_back() -> None:
    pod, _ = triton(1)
    pod.engines["n0:80"] = TritonEngine({"m": {"1": " Paris"}}, "m")
    pod.node("t0:80").in_flight = 1
    moved: list[asyncio.Task[Accepted | Refused]] = []

    def moves() -> None:
        if pod.progress.step == "drain" and not moved:
            half = Update(service=NAME, version="v2", weights={"v1": 0.5, "v2": 0.5}, by="bob")
            moved.append(asyncio.ensure_future(pod.submit(half)))

    pod.clock.between.append(moves)
    wanted = Wanted(
        model="m", action="load", kind="version", version="v2", engine="triton", endpoints=("http://n0:80",)
    )
    progress = await pod.does(wanted)
    assert progress.why.startswith("drain failed: not within 130 s")
    assert pod.weights()["v2"] == PARTS // 2
    assert [step.detail for step in progress.steps[-2:]] == [
        "somebody has moved them since: they stay as they are",
        "somebody has given it traffic: its endpoints stay",
    ]


async def test_others_have_a_second_to_hear_that_an_endpoint_rests() -> None:
    pod, engines = vllm()
    pod.members = 2
    loaded: list[float] = []
    does = engines[0].does

    def watched(method: str, path: str, said: dict[str, Any]) -> Answer:
        if path == "/v1/load_lora_adapter":
            loaded.append(pod.clock.now)
        return does(method, path, said)

    engines[0].does = watched  # type: ignore[method-assign]
    assert (await pod.does(ADAPTER)).phase == "done"
    assert loaded[0] >= 1001.0


@pytest.mark.parametrize("what", ["version", "index", "surrogate"])
async def test_what_an_engine_says_is_told_as_far_as_a_record_takes_it(what: str) -> None:
    pod, engines = triton()
    if what == "version":
        event = b'data: {"model_version":"%b","text_output":" Rome"}\n\n' % (b"9" * 100_000)
        engines[0].break_at("generate", Answer(200, event, b"text/event-stream"))
    elif what == "index":
        entries = [{"name": "m", "version": str(number), "state": "UNLOADING"} for number in range(1, 10_000)]
        engines[0].break_at("/index", told(entries))
    else:
        engines[0].break_at("/load", Answer(400, b'{"error":"\\ud800 no"}', b"application/json"))
    wanted = replace(RELOAD, model_version="2")
    if what == "index":
        wanted = Wanted(model="m", action="unload", kind="repository", anyway=True)
    progress = await pod.does(wanted)
    assert progress.phase != "done" and len(progress.why) < 1000
    assert pod.log.view is not None
    assert decode(encode(pod.log.view.table)).update == progress
