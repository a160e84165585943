"""Every metric there is, in one file.

Names are `sidecar_<noun>_<unit>[_total]`, and the GenAI semantic conventions' where those have one (dots become
underscores, seconds are appended). Labels are bounded: service, version and endpoint come from policy, model goes
through `ModelNames`, all else is an enum. Sessions, requests and users are never labels.

Two kinds: what is counted when a record ends (plain numbers, see `series`), and what is read off the fleet at the
scrape (see `live`). A scrape renders on the loop, a slice at a time; prometheus-client gives the process's own figures.
"""

import asyncio
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from sidecar.core.breaker import Scope, Transition
from sidecar.core.desk import Desk
from sidecar.core.fleet import Fleet
from sidecar.core.quotas.quota import Ledger
from sidecar.core.sketch import bucket_of
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.kernel.outcome import Ending, Result
from sidecar.proxy.ports import AttemptRecord, RequestRecord
from sidecar.telemetry.jwt import Tokens
from sidecar.telemetry.labels import ModelNames, status_word
from sidecar.telemetry.live import LiveGauges, Source, Watched
from sidecar.telemetry.series import Cell, Counters, Histograms, Labels, Summaries
from sidecar.telemetry.tokens import Counter
from sidecar.wire.call import API_BY_PATH

# Bounds as the GenAI semantic conventions advise them (opentelemetry.io, gen-ai-metrics).
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
GAP_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Every Prometheus reads this format, whatever else it asks for."""

SLICE: Final = 100
"""Pieces rendered before the loop may go on: some 300 us at worst."""

INFERENCE_PATHS: Final = frozenset(path.decode() for path in API_BY_PATH)


_SUCCESS: Final = Result.SUCCESS
_FAILURE: Final = Result.FAILURE


class Metrics:
    """The registry and everything in it. Written by the loop's thread only; recording never waits, never raises."""

    def __init__(self, build: str = "") -> None:
        self.live = LiveGauges(build)
        self.models = ModelNames()
        self._request_series: dict[tuple[str, str, str, int], _RequestSeries] = {}
        self._attempt_series: dict[tuple[str, str, str], AttemptSeries] = {}
        self.touched: list[AttemptSeries] = []
        """On whose endpoints attempts ended since `tally` last looked; each once."""
        self._rendering = asyncio.Lock()
        self._families: list[Counters | Summaries | Histograms] = []
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

        three: Labels = ("service", "model", "version")
        gen_ai: Labels = ("service", "gen_ai_request_model", "version")
        self.requests = self._counters(
            "sidecar_requests_total",
            "Requests that ended, by what the client got",
            (*three, "outcome", "status", "reason"),
        )
        self.retries = self._counters("sidecar_retries_total", "Wire attempts beyond the first of their request", three)
        self.tokens = self._counters("sidecar_stream_tokens_total", "Token-bearing events relayed in streams", three)
        self.downstream_bytes = self._counters(
            "sidecar_downstream_bytes_total", "Body bytes from (in) and to (out) clients", (*three, "direction")
        )
        self.refused_heads = self._counters(
            "sidecar_refused_heads_total",
            "Requests that never became one: malformed, oversized or too slow heads",
            ("reason",),
        )
        self.duration = self._histograms(
            "gen_ai_server_request_duration_seconds",
            "Inference requests, from their head to their last byte",
            (*gen_ai, "outcome"),
            DURATION_S,
        )
        self.ttft = self._histograms(
            "gen_ai_server_time_to_first_token_seconds", "From a request's head to its first token", gen_ai, TTFT_S
        )
        self.tpot = self._histograms(
            "gen_ai_server_time_per_output_token_seconds",
            "Time after the first token, per further token, of complete streams",
            gen_ai,
            TPOT_S,
        )
        self.gap = self._histograms(
            "sidecar_token_gap_max_seconds", "The longest gap between two tokens of a stream", three, GAP_S
        )
        self.usage = self._histograms(
            "gen_ai_client_token_usage",
            "Tokens per request as the engine reported them",
            (*gen_ai, "gen_ai_token_type"),
            TOKENS,
        )
        self.queue_wait = self._histograms(
            "sidecar_queue_wait_seconds",
            "How long requests waited for their turn, or until they were turned away, of those that had to wait",
            ("service", "qos"),
            WAIT_S,
        )

        node: Labels = ("service", "version", "endpoint")
        self.attempts = self._counters(
            "sidecar_attempts_total", "Wire attempts that ended, by how", (*node, "ending", "outcome")
        )
        self.probe_copies = self._counters(
            "sidecar_probe_copies_total",
            "Wire attempts that were copies of a request, sent to an endpoint on trial",
            (*node, "outcome"),
        )
        self.health_canaries = self._counters(
            "sidecar_health_canaries_total",
            "Requests of our own for one token, by which health checks ask whether an engine serves",
            (*node, "ending", "outcome"),
        )
        self.attempt_duration = self._summaries("sidecar_attempt_duration_seconds", "Wire attempts", node)
        self.attempt_ttft = self._summaries(
            "sidecar_attempt_time_to_first_token_seconds", "Wire attempts, to their first token", node
        )
        self.attempt_connections = self._counters(
            "sidecar_attempt_connections_total",
            "Attempts by whether their connection was new or reused",
            (*node, "kind"),
        )
        self.malformed_events = self._counters(
            "sidecar_malformed_events_total", "Events in answers that are not what their API says", node
        )
        self.malformed_upstream_bytes = self._counters(
            "sidecar_malformed_upstream_total",
            "Answers that are not HTTP, or bytes after an answer's end",
            ("endpoint",),
        )

        self.transitions = self._counters(
            "sidecar_breaker_transitions_total",
            "Breaker transitions, by what made them; endpoint only in scope node",
            ("scope", "service", "endpoint", "old", "new", "why"),
        )
        self.policy_loads = self._counters(
            "sidecar_policy_loads_total", "Policy loads: applied, or refused with the last good kept", ("outcome",)
        )
        self.route_updates = self._counters(
            "sidecar_route_updates_total",
            "Updates of routing tables asked here: accepted, repeated, or why they were refused",
            ("result",),
        )
        self.rollout_moves = self._counters(
            "sidecar_rollout_transitions_total",
            "Canaries that came to another step or phase, by where to; each sidecar counts what it heard",
            ("service", "to"),
        )
        self.model_update_steps = self._counters(
            "sidecar_model_update_steps_total",
            "Steps of model updates led here that ended, by the step and whether it was done; step all: whole updates",
            ("step", "result"),
        )
        self.model_update_seconds = self._summaries(
            "sidecar_model_update_step_seconds", "How long steps of model updates took, and whole ones", ("step",)
        )
        self.xds_pushes_sent = self._counters(
            "sidecar_xds_pushes_total", "Resources sent to Envoys, by their type", ("type",)
        )
        # Both exist from the start, so that an alert on a rise sees the first one.
        self._applied = self.policy_loads.child(("applied",))
        self._refused = self.policy_loads.child(("refused",))

    def request(self, record: RequestRecord) -> None:
        """Count one request that ended."""
        result = record.result
        label = self.models.label(record.model, result is _SUCCESS)
        # By identity: an Enum's hash is a Python function, and its members live as long as the process.
        key = (record.service, label, record.version, id(result))
        series = self._request_series.get(key)
        if series is None:
            series = _RequestSeries(self, (record.service, label, record.version, result.value))
            self._request_series[key] = series
        series.take(record)

    def attempt(self, record: AttemptRecord) -> None:
        """Count one wire attempt that ended."""
        key = (record.service, record.version, record.endpoint)
        series = self._attempt_series.get(key)
        if series is None:
            series = self._attempt_series[key] = AttemptSeries(self, key)
        if not series.touched:
            series.touched = True
            self.touched.append(series)
        series.take(record)

    def successes(self, service: str, version: str, endpoint: str) -> int:
        """How many attempts on an endpoint ended well."""
        series = self._attempt_series.get((service, version, endpoint))
        if series is None:
            return 0
        return sum([cell.n for (_, result), cell in series.endings.items() if result == id(_SUCCESS)])

    def canary(self, service: str, version: str, endpoint: str, ending: Ending, result: Result) -> None:
        """Count a health check's request for one token."""
        self.health_canaries.child((service, version, endpoint, ending.value, result.value)).n += 1

    def transition(self, transition: Transition) -> None:
        """Count one breaker transition."""
        endpoint = transition.key if transition.scope is Scope.NODE else ""
        self.transitions.child(
            (
                transition.scope,
                transition.service,
                endpoint,
                transition.old.value,
                transition.new.value,
                transition.why,
            )
        ).n += 1

    def refused(self, reason: Reason) -> None:
        """Count a head that was refused."""
        self.refused_heads.child((reason.value,)).n += 1

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        """Count bytes of an engine that are not HTTP."""
        self.malformed_upstream_bytes.child((endpoint,)).n += 1

    def policy_load(self, applied: bool) -> None:
        """Count a policy load: applied, or refused."""
        (self._applied if applied else self._refused).n += 1

    def route_update(self, result: str) -> None:
        """Count an update of a routing table: `accepted`, `repeated`, or the code of its refusal."""
        self.route_updates.child((result,)).n += 1

    def rollout_moved(self, service: str, to: str) -> None:
        """Count a canary's change: `step`, or the phase that it came to."""
        self.rollout_moves.child((service, to)).n += 1

    def model_update_stepped(self, step: str, result: str, took_s: float) -> None:
        """Count a step of a model update that was led here, or, as `all`, an update."""
        self.model_update_steps.child((step, result)).n += 1
        self.model_update_seconds.child((step,)).observe(took_s)

    def xds_push(self, kind: str) -> None:
        """Count a push to an Envoy: `cds`, `eds`, `lds` or `rds`."""
        self.xds_pushes_sent.child((kind,)).n += 1

    def watch_desk(self, desk: Desk) -> None:
        """Read the routing tables off `desk` at every scrape."""
        self.live.desk = desk

    def watch_ledger(self, ledger: Ledger) -> None:
        """Read what quotas took and refused off `ledger` at every scrape."""
        self.live.ledger = ledger

    def watch_jwt(self, tokens: Tokens) -> None:
        """Read what was believed and refused off `tokens` at every scrape."""
        self.live.tokens = tokens

    def watch_counter(self, counter: Counter) -> None:
        """Read how prompts were counted off `counter` at every scrape."""
        self.live.counter = counter

    def watch(self, name: Watched, source: Source) -> None:
        """Read `source()` at every scrape, on the loop's thread; it must not wait."""
        self.live.sources[name] = source

    def watch_fleet(self, fleet: Fleet, now: Source) -> None:
        """Read breakers, sessions and load off `fleet` at every scrape; `now`: monotonic seconds."""
        self.live.fleet = fleet
        self.live.now = now

    def retain(self, fleet: Fleet, only: Collection[str] = ()) -> None:
        """Forget the series of services and endpoints that `fleet` no longer has. Call after a policy was applied.

        `only`: services of which endpoints left; all others are as they were.
        """
        if only:
            self._retain_nodes(fleet, frozenset(only))
            return
        services = {str(name) for name in fleet.services} | {""}
        nodes = {(str(name), str(key)) for name, service in fleet.services.items() for key in service.nodes}
        endpoints = {key for _, key in nodes}
        # A series holds its children: those whose children are dropped here would count on in the void.
        self._request_series.clear()
        self._attempt_series = {
            key: series for key, series in self._attempt_series.items() if (key[0], key[2]) in nodes
        }
        self.touched = [series for series in self.touched if (series.key[0], series.key[2]) in nodes]
        for family in (self.requests, self.retries, self.tokens, self.downstream_bytes):
            family.retain(lambda labels: labels[0] in services)
        for histograms in (self.duration, self.ttft, self.tpot, self.gap, self.usage):
            histograms.retain(lambda labels: labels[0] in services)
        for counters in (
            self.attempts,
            self.probe_copies,
            self.health_canaries,
            self.attempt_connections,
            self.malformed_events,
        ):
            counters.retain(lambda labels: (labels[0], labels[2]) in nodes)
        for summaries in (self.attempt_duration, self.attempt_ttft):
            summaries.retain(lambda labels: (labels[0], labels[2]) in nodes)
        classes = fleet.classes.by_name
        self.queue_wait.retain(lambda labels: labels[0] in services and labels[1] in classes)
        self.malformed_upstream_bytes.retain(lambda labels: labels[0] in endpoints)
        self.rollout_moves.retain(lambda labels: labels[0] in services)
        self.transitions.retain(
            lambda labels: labels[1] in services and (not labels[2] or (labels[1], labels[2]) in nodes)
        )

    def _retain_nodes(self, fleet: Fleet, only: frozenset[str]) -> None:
        services = [(name, fleet.services.get(ServiceName(name))) for name in only]
        nodes = {(name, str(key)) for name, service in services if service is not None for key in service.nodes}

        def stays(service: str, node: str) -> bool:
            return service not in only or (service, node) in nodes

        self._attempt_series = {key: series for key, series in self._attempt_series.items() if stays(key[0], key[2])}
        self.touched = [series for series in self.touched if stays(series.key[0], series.key[2])]
        for counters in (
            self.attempts,
            self.probe_copies,
            self.health_canaries,
            self.attempt_connections,
            self.malformed_events,
        ):
            counters.retain(lambda labels: stays(labels[0], labels[2]))
        for summaries in (self.attempt_duration, self.attempt_ttft):
            summaries.retain(lambda labels: stays(labels[0], labels[2]))
        self.transitions.retain(lambda labels: not labels[2] or stays(labels[1], labels[2]))

    async def render(self) -> tuple[bytes, str]:
        """The exposition and its content type. One scrape at a time renders; each lets the loop go on in between."""
        async with self._rendering:
            pieces = self._pieces()
            text = []
            while some := list(islice(pieces, SLICE)):
                text.append("".join(some).encode())
                await asyncio.sleep(0)
            # Reads /proc.
            text.append(await asyncio.to_thread(generate_latest, self._process))
            return b"".join(text), CONTENT_TYPE

    def _pieces(self) -> Iterator[str]:
        return chain(self.live.pieces(), chain.from_iterable(family.pieces() for family in self._families))

    def _counters(self, name: str, text: str, labels: Labels) -> Counters:
        family = Counters(name, text, labels)
        self._families.append(family)
        return family

    def _summaries(self, name: str, text: str, labels: Labels) -> Summaries:
        family = Summaries(name, text, labels)
        self._families.append(family)
        return family

    def _histograms(self, name: str, text: str, labels: Labels, bounds: tuple[float, ...]) -> Histograms:
        family = Histograms(name, text, labels, bounds)
        self._families.append(family)
        return family


class _RequestSeries:
    """What the requests of one service, model, version and outcome increment, looked up once."""

    __slots__ = (
        "_labels",
        "_metrics",
        "bytes_in",
        "bytes_out",
        "completion",
        "duration",
        "gap",
        "outcomes",
        "prompt",
        "retries",
        "tokens",
        "tpot",
        "ttft",
    )

    def __init__(self, metrics: Metrics, labels: tuple[str, str, str, str]) -> None:
        three = labels[:3]
        self._metrics = metrics
        self._labels = labels
        self.outcomes: dict[tuple[int, Reason | None], Cell] = {}
        self.retries = metrics.retries.child(three)
        self.tokens = metrics.tokens.child(three)
        self.bytes_in = metrics.downstream_bytes.child((*three, "in"))
        self.bytes_out = metrics.downstream_bytes.child((*three, "out"))
        self.duration = metrics.duration.child(labels)
        self.ttft = metrics.ttft.child(three)
        self.tpot = metrics.tpot.child(three)
        self.gap = metrics.gap.child(three)
        self.prompt = metrics.usage.child((*three, "input"))
        self.completion = metrics.usage.child((*three, "output"))

    def take(self, record: RequestRecord) -> None:
        outcome = self.outcomes.get((record.status, record.reason))
        if outcome is None:
            outcome = self._outcome(record.status, record.reason)
        outcome.n += 1
        self.bytes_in.n += record.bytes_in
        self.bytes_out.n += record.bytes_out
        if record.attempts > 1:
            self.retries.n += record.attempts - 1
        if record.path in INFERENCE_PATHS:
            self.duration.observe(record.duration_s)
        tokens = record.tokens
        ttft_s = record.ttft_s
        if ttft_s is not None:
            self.tokens.n += tokens
            self.ttft.observe(ttft_s)
            if tokens > 1 and record.result is _SUCCESS:
                self.tpot.observe((record.duration_s - ttft_s) / (tokens - 1))
        if record.max_gap_s is not None:
            self.gap.observe(record.max_gap_s)
        if record.prompt_tokens is not None:
            self.prompt.observe(record.prompt_tokens)
        if record.completion_tokens is not None:
            self.completion.observe(record.completion_tokens)
        if record.queued_s is not None:
            self._metrics.queue_wait.child((record.service, record.qos)).observe(record.queued_s)

    def _outcome(self, status: int, reason: Reason | None) -> Cell:
        labels = (*self._labels, status_word(status), reason.value if reason else "")
        cell = self.outcomes[status, reason] = self._metrics.requests.child(labels)
        return cell


class AttemptSeries:
    """What the attempts on one endpoint of one service increment.

    What `tally` takes away once a second: `first_tokens`, a sketch (`core.sketch`), and failures in a row: `first_run`
    before the first success (`well`: there was one), `longest_run`, and `run` by now. `touched`: it is due to be looked
    at, `told` and `told_copies` are what the cells said when it last was.
    """

    __slots__ = (
        "_metrics",
        "copies",
        "duration",
        "endings",
        "first_run",
        "first_tokens",
        "key",
        "longest_run",
        "malformed",
        "new",
        "reused",
        "run",
        "told",
        "told_copies",
        "touched",
        "ttft",
        "well",
    )

    def __init__(self, metrics: Metrics, key: tuple[str, str, str]) -> None:
        self.key = key
        self._metrics = metrics
        self.endings: dict[tuple[Ending, int], Cell] = {}
        self.copies: dict[int, Cell] = {}
        self.duration = metrics.attempt_duration.child(key)
        self.ttft = metrics.attempt_ttft.child(key)
        self.malformed = metrics.malformed_events.child(key)
        self.new = metrics.attempt_connections.child((*key, "new"))
        self.reused = metrics.attempt_connections.child((*key, "reused"))
        self.first_tokens: dict[int, int] = {}
        self.first_run = self.longest_run = self.run = 0
        self.well = False
        self.touched = False
        self.told: dict[tuple[Ending, int], int] = {}
        self.told_copies: dict[int, int] = {}

    def take(self, record: AttemptRecord) -> None:
        """Count one attempt."""
        ending = self.endings.get((record.ending, id(record.result)))
        if ending is None:
            ending = self._metrics.attempts.child((*self.key, record.ending.value, record.result.value))
            self.endings[record.ending, id(record.result)] = ending
        ending.n += 1
        if record.result is _SUCCESS:
            self.run = 0
            self.well = True
        elif record.result is _FAILURE:
            self.run += 1
            if self.run > self.longest_run:
                self.longest_run = self.run
            if not self.well:
                self.first_run = self.run
        if record.copy:
            copies = self.copies.get(id(record.result))
            if copies is None:
                copies = self._metrics.probe_copies.child((*self.key, record.result.value))
                self.copies[id(record.result)] = copies
            copies.n += 1
        self.duration.observe(record.duration_s)
        ttft_s = record.ttft_s
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
            bucket = bucket_of(ttft_s)
            self.first_tokens[bucket] = self.first_tokens.get(bucket, 0) + 1
        if record.malformed_events:
            self.malformed.n += record.malformed_events
        if record.reused_connection:
            self.reused.n += 1
        else:
            self.new.n += 1
