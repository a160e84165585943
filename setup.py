"""Builds the package; with SIDECAR_COMPILE=1 the request path is compiled by mypyc (docs/adr/0007).

The source stays plain Python and runs the same without being compiled. Left uncompiled: what runs once or rarely, and
the shapes that msgspec decodes into, whose annotations mypyc does not keep.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILED = [
    "sidecar/kernel/errors.py",
    "sidecar/kernel/exchange.py",
    "sidecar/kernel/outcome.py",
    "sidecar/wire/answer.py",
    "sidecar/wire/call.py",
    "sidecar/wire/headers.py",
    "sidecar/wire/prompt.py",
    "sidecar/wire/refusal.py",
    "sidecar/wire/sse.py",
    "sidecar/wire/stream.py",
    "sidecar/adapters/deepspeed.py",
    "sidecar/adapters/openai.py",
    "sidecar/adapters/reading.py",
    "sidecar/adapters/triton.py",
    "sidecar/core/balance.py",
    "sidecar/core/breaker.py",
    "sidecar/core/budget.py",
    "sidecar/core/canary.py",
    "sidecar/core/claim.py",
    "sidecar/core/classes.py",
    "sidecar/core/classify.py",
    "sidecar/core/detection.py",
    "sidecar/core/detector.py",
    "sidecar/core/evidence.py",
    "sidecar/core/fleet.py",
    "sidecar/core/gate/admit.py",
    "sidecar/core/gate/evict.py",
    "sidecar/core/gate/headroom.py",
    "sidecar/core/gate/lanes.py",
    "sidecar/core/gate/limit.py",
    "sidecar/core/gate/parts.py",
    "sidecar/core/gate/turns.py",
    "sidecar/core/gate/usual.py",
    "sidecar/core/gate/view.py",
    "sidecar/core/identify.py",
    "sidecar/core/latency.py",
    "sidecar/core/models.py",
    "sidecar/core/normal.py",
    "sidecar/core/poison.py",
    "sidecar/core/pool.py",
    "sidecar/core/quotas/answer_lengths.py",
    "sidecar/core/quotas/meter.py",
    "sidecar/core/quotas/quota.py",
    "sidecar/core/quotas/rate_lines.py",
    "sidecar/core/quotas/tenant_budget.py",
    "sidecar/core/service.py",
    "sidecar/core/sketch.py",
    "sidecar/core/split.py",
    "sidecar/core/wager.py",
    "sidecar/core/window.py",
    "sidecar/proxy/admission.py",
    "sidecar/proxy/arrival.py",
    "sidecar/proxy/attempt.py",
    "sidecar/proxy/closing.py",
    "sidecar/proxy/door.py",
    "sidecar/proxy/exchange.py",
    "sidecar/proxy/flags.py",
    "sidecar/proxy/forwarded.py",
    "sidecar/proxy/pipeline.py",
    "sidecar/proxy/ports.py",
    "sidecar/proxy/probe.py",
    "sidecar/proxy/request.py",
    "sidecar/proxy/translated.py",
    "sidecar/proxy/watchdog.py",
    "sidecar/downstream/connection.py",
    "sidecar/downstream/parser.py",
    "sidecar/upstream/connection.py",
    "sidecar/upstream/pool.py",
    "sidecar/telemetry/labels.py",
    "sidecar/telemetry/line.py",
    "sidecar/telemetry/metrics.py",
    "sidecar/telemetry/recorder.py",
    "sidecar/telemetry/series.py",
    "sidecar/tokens/estimate.py",
]

# mypyc 2.4 raises SystemError for bytes[start:end] with start > end, where Python gives b"". Peers choose such numbers,
# so no slice of ours shall depend on who compiled it: its runtime is compiled with this line changed.
RAISES = "Py_ssize_t slice_len = endn - startn;"
EMPTY = "Py_ssize_t slice_len = endn > startn ? endn - startn : 0;"

# The modules are one library, whose functions nobody replaces: calls among them need no detour over the linker's
# tables. A twentieth of the path's time (bench.path_cost, 11.4 to 10.8 us).
DIRECT_CALLS = ["-fno-semantic-interposition", "-fno-plt"]


def compiled() -> list[Extension]:
    """The extensions of the compiled modules; their C sources are written under build/."""
    try:
        from mypyc.build import include_dir, mypycify
    except ModuleNotFoundError:
        sys.exit(
            "SIDECAR_COMPILE=1 needs mypy and the package's own dependencies, since it compiles by their types:\n"
            "  pip install '.[compile]'\n"
            "  SIDECAR_COMPILE=1 pip install --no-build-isolation --no-deps --force-reinstall ."
        )
    extensions = mypycify(COMPILED, opt_level="3", debug_level="0")
    runtime = Path(include_dir(), "bytes_ops.c").read_text(encoding="utf-8")
    if runtime.count(RAISES) != 1:
        sys.exit("mypyc's bytes_ops.c is another one than setup.py mends: see whether its slices still raise")
    mended = Path("build", "mended")
    mended.mkdir(parents=True, exist_ok=True)
    (mended / "bytes_ops.c").write_text(runtime.replace(RAISES, EMPTY), encoding="utf-8")
    for extension in extensions:
        extension.include_dirs.insert(0, str(mended))
        if sys.platform == "linux":
            extension.extra_compile_args += DIRECT_CALLS
            extension.extra_link_args += ["-Wl,-Bsymbolic"]
    return extensions


if __name__ == "__main__":
    setup(ext_modules=compiled() if os.environ.get("SIDECAR_COMPILE") == "1" else [])
