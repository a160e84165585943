"""Recorded engine traffic, read back: bodies and statuses, as they were on the wire."""

import re
from pathlib import Path

_HERE = Path(__file__).parent
_BODY = re.compile(rb"^\{ \[\d+ bytes data\]\n(.*?)(?=^\* |\* Connection #0|\* Closing|\Z)", re.S | re.M)


def body(name: str) -> bytes:
    """The body of a recording, `folder/file`."""
    recorded = (_HERE / name).read_bytes()
    if not name.endswith(".txt"):
        return recorded
    found = _BODY.search(recorded)
    assert found is not None, name
    return found[1]


def status(name: str) -> int:
    """The status of a transcript."""
    found = re.search(rb"^< HTTP/1\.[01] (\d+)", (_HERE / name).read_bytes(), re.M)
    assert found is not None, name
    return int(found[1])
