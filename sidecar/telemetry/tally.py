"""What was counted since the last look, endpoint by endpoint: the difference of metrics that are there anyway.

Nothing of it is on the request's path but one mark per endpoint and second, and the sketch of first tokens. Whoever
looks pays for the endpoints where something ended, and not for all there are.
"""

from typing import Final

from sidecar.core.tally import Ended, EndpointTally, ServiceTally
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Result
from sidecar.telemetry.metrics import AttemptSeries, Metrics

_RESULTS: Final = {id(result): result for result in Result}
"""The metrics know results by identity; they live as long as the process."""


class Tally:
    """The only reader of `metrics.touched`: two would each see a part."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def take(self) -> list[ServiceTally]:
        """What ended since the last call, by service; nothing of services where nothing did."""
        touched, self._metrics.touched = self._metrics.touched, []
        services: dict[str, list[EndpointTally]] = {}
        for series in touched:
            series.touched = False
            service, version, endpoint = series.key
            services.setdefault(service, []).append(
                EndpointTally(
                    EndpointKey(endpoint),
                    version,
                    _ended(series),
                    _copies(series),
                    series.first_tokens,
                    (series.first_run, series.longest_run, series.run),
                )
            )
            series.first_tokens = {}
            series.first_run = series.longest_run = series.run = 0
            series.well = False
        return [ServiceTally(service, endpoints) for service, endpoints in services.items()]


def _ended(series: AttemptSeries) -> Ended:
    told = series.told
    ended: Ended = {}
    for key, cell in series.endings.items():
        more = cell.n - told.get(key, 0)
        if more:
            told[key] = cell.n
            ended[key[0], _RESULTS[key[1]]] = more
    return ended


def _copies(series: AttemptSeries) -> dict[Result, int]:
    told = series.told_copies
    copies: dict[Result, int] = {}
    for key, cell in series.copies.items():
        more = cell.n - told.get(key, 0)
        if more:
            told[key] = cell.n
            copies[_RESULTS[key]] = more
    return copies
