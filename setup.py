"""Builds the package; with SIDECAR_COMPILE=1 the request path is compiled by mypyc (docs/adr/0007).

The source stays plain Python and runs the same without being compiled. Left uncompiled: what runs once or rarely, and
the shapes that msgspec decodes into, whose annotations mypyc does not keep.
"""

import os

from setuptools import setup

COMPILED = [
    "sidecar/kernel/errors.py",
    "sidecar/kernel/exchange.py",
    "sidecar/kernel/outcome.py",
    "sidecar/wire/answer.py",
    "sidecar/wire/call.py",
    "sidecar/wire/headers.py",
    "sidecar/wire/refusal.py",
    "sidecar/wire/sse.py",
    "sidecar/wire/stream.py",
    "sidecar/core/balance.py",
    "sidecar/core/breaker.py",
    "sidecar/core/budget.py",
    "sidecar/core/classify.py",
    "sidecar/core/fleet.py",
    "sidecar/core/identify.py",
    "sidecar/core/split.py",
    "sidecar/core/window.py",
    "sidecar/proxy/attempt.py",
    "sidecar/proxy/flags.py",
    "sidecar/proxy/forwarded.py",
    "sidecar/proxy/pipeline.py",
    "sidecar/proxy/ports.py",
    "sidecar/proxy/request.py",
    "sidecar/proxy/watchdog.py",
    "sidecar/downstream/connection.py",
    "sidecar/downstream/parser.py",
    "sidecar/upstream/connection.py",
    "sidecar/telemetry/metrics.py",
    "sidecar/telemetry/recorder.py",
    "sidecar/telemetry/series.py",
]

if os.environ.get("SIDECAR_COMPILE") == "1":
    from mypyc.build import mypycify

    setup(ext_modules=mypycify(COMPILED, opt_level="3", debug_level="0"))
else:
    setup()
