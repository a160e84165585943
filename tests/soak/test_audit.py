"""Whether the soak sees metrics that do not fit the log."""

import pytest

from soak.audit import check_metrics
from soak.ledger import Ledger
from soak.stage import Sample, samples
from tests.soak.test_ledger import ASK, LINE, SEEN

EXPOSITION = f"""\
# HELP sidecar_requests_total Requests
# TYPE sidecar_requests_total counter
sidecar_requests_total{{service="chat",model="a",version="v1",outcome="success",status="200",reason=""}} 1
sidecar_downstream_bytes_total{{service="chat",model="a",version="v1",direction="in"}} {LINE.bytes_in}
sidecar_downstream_bytes_total{{service="chat",model="a",version="v1",direction="out"}} {LINE.bytes_out}
sidecar_retries_total{{service="chat",model="a",version="v1"}} 0
sidecar_stream_tokens_total{{service="chat",model="a",version="v1"}} {LINE.tokens}
sidecar_refused_heads_total{{reason="bad_request"}} 0
process_open_fds 20.0
"""


def settled() -> Ledger:
    ledger = Ledger()
    ledger.saw(ASK, SEEN)
    ledger.read(LINE, "raw")
    ledger.close()
    return ledger


def test_an_exposition_is_read_as_numbers() -> None:
    read = samples(EXPOSITION)
    assert read[("process_open_fds", ())] == 20.0
    assert read[("sidecar_refused_heads_total", (("reason", "bad_request"),))] == 0.0
    assert len(read) == 7


def test_metrics_that_fit_pass() -> None:
    ledger = settled()
    check_metrics(ledger, samples(EXPOSITION))
    assert not ledger.broken


@pytest.mark.parametrize("name", sorted({name for name, _ in samples(EXPOSITION) if name.startswith("sidecar_")}))
def test_a_total_that_does_not_fit_is_found(name: str) -> None:
    metrics: dict[Sample, float] = {
        key: value + 1 if key[0] == name else value for key, value in samples(EXPOSITION).items()
    }
    ledger = settled()
    check_metrics(ledger, metrics)
    assert ledger.broken["metrics and log agree"]


def test_more_lines_than_clients_are_found() -> None:
    ledger = settled()
    ledger.expected_lines = 0
    check_metrics(ledger, samples(EXPOSITION))
    assert ledger.broken == {"metrics and log agree": 1}
