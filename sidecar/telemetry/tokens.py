"""How prompts were counted, and how good the estimates are: read off the counter at every scrape.

By service and never by model: models are what clients call them, and there may be hundreds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Final, Protocol

from sidecar.core.fleet import Fleet
from sidecar.telemetry.series import Kind, header, label_text


class Estimator(Protocol):
    """One model's estimates. `errors`: how many were compared with what its engine said; `error_ratio`: by how much
    the last ones were off, of the truth."""

    @property
    def errors(self) -> int: ...

    @property
    def error_ratio(self) -> float: ...


class Model(Protocol):
    """One model of a service."""

    @property
    def service(self) -> str: ...

    @property
    def estimator(self) -> Estimator: ...


class Counter(Protocol):
    """Who counts prompts, as far as he counts himself. Implemented by tokens."""

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def late(self) -> int: ...

    @property
    def refused(self) -> int: ...

    @property
    def uncountable(self) -> int: ...

    @property
    def failed(self) -> int: ...

    @property
    def left(self) -> int: ...

    @property
    def lies(self) -> int: ...

    @property
    def counted_bytes(self) -> int: ...

    @property
    def counting_s(self) -> float: ...

    @property
    def pending_bytes(self) -> int: ...

    @property
    def prefixes(self) -> Sized: ...

    def models(self) -> Iterable[Model]:
        """What is known of each model."""

    def why_not(self, service: str) -> str:
        """Why a service's prompts are not counted exactly; empty: they are."""


COUNTER_METRICS: Final[tuple[tuple[str, Kind, str, Callable[[Counter], float]], ...]] = (
    (
        "sidecar_token_counted_bytes_total",
        "counter",
        "Bytes of prompts that threads counted",
        lambda counter: counter.counted_bytes,
    ),
    (
        "sidecar_token_counting_seconds_total",
        "counter",
        "How long the threads counted",
        lambda counter: counter.counting_s,
    ),
    (
        "sidecar_token_pending_bytes",
        "gauge",
        "Bytes of prompts that the threads have not counted yet",
        lambda counter: counter.pending_bytes,
    ),
    (
        "sidecar_token_prefixes",
        "gauge",
        "Beginnings of conversations whose count is remembered",
        lambda counter: len(counter.prefixes),
    ),
    (
        "sidecar_token_reports_disbelieved_total",
        "counter",
        "Numbers of prompt tokens from engines that are far from what the tokenizer counts",
        lambda counter: counter.lies,
    ),
)

LOST: Final[tuple[tuple[str, Callable[[Counter], int]], ...]] = (
    ("late", lambda counter: counter.late),
    ("refused", lambda counter: counter.refused),
    ("uncountable", lambda counter: counter.uncountable),
    ("failed", lambda counter: counter.failed),
    ("left", lambda counter: counter.left),
)
"""Why an exact count did not come: the request's time was over, too much waited, the prompt cannot be counted, the
library failed, the client left."""


def pieces(counter: Counter, fleet: Fleet | None) -> Iterator[str]:
    """The text; may be suspended between pieces while requests go on."""
    name = "sidecar_prompts_counted_total"
    yield header(name, "Prompts whose tokens were needed, by how they were counted", "counter")
    yield "".join([f'{name}{{how="{how}"}} {count}\n' for how, count in counter.counts.items()])
    name = "sidecar_token_counts_lost_total"
    yield header(name, "Exact counts that did not come in time, by why; the prompt was estimated", "counter")
    yield "".join([f'{name}{{why="{why}"}} {read(counter)}\n' for why, read in LOST])
    for name, kind, text, value in COUNTER_METRICS:
        yield f"{header(name, text, kind)}{name} {value(counter)}\n"
    name = "sidecar_token_estimate_error_ratio"
    yield header(name, "How far the last estimates were off, of what the engine said, without their sign", "gauge")
    for service, error in _errors(counter).items():
        yield f"{name}{{{label_text(('service',), (service,))}}} {error!r}\n"
    name = "sidecar_tokenizer_ready"
    yield header(name, "1 while prompts of a service that has a tokenizer are counted with it", "gauge")
    for service, state in list(fleet.services.items()) if fleet is not None else ():
        if state.policy.tokenizer:
            yield f"{name}{{{label_text(('service',), (service,))}}} {int(not counter.why_not(service))}\n"


def _errors(counter: Counter) -> dict[str, float]:
    """By service: of its models, by how much each was asked for."""
    sums: dict[str, tuple[float, int]] = {}
    for model in counter.models():
        estimator = model.estimator
        if estimator.errors:
            error, weight = sums.get(model.service, (0.0, 0))
            sums[model.service] = (error + estimator.error_ratio * estimator.errors, weight + estimator.errors)
    return {service: error / weight for service, (error, weight) in sums.items()}
