"""The image's size, cold start and idle memory, from its own steps run into a folder: `make bench-image`.

1. Compiled as the image is, and started as by a pod (`tests/deploy/prefix.py`): read-only, as the image's user.
2. A start counts from the command's exec to the first 200, the median of `--starts`. The page cache is warm, as on a
   node that pulled the image a moment ago; the engine is there before.
3. `plain base`: the standard library without byte code, as the base has it before the Dockerfile's own step.
4. The base's own size is not in it: there is no base here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.prefix import ROOT, Image
from tests.servers import free_port

LARGEST = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.image", description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--kept", action="store_true", help="what was built is measured as it is")
    args = parser.parse_args(argv)
    image = Image(ROOT / "build" / "image" / "compiled", compiled=True)
    if not args.kept:
        image.build()
    print(json.dumps({"size": size(image), "starts": starts(image, args.starts)}, indent=2))
    return 0


def size(image: Image) -> dict[str, object]:
    """In MB of 1e6 bytes, as files are long."""
    (site,) = image.prefix.glob("lib/python3*/site-packages")
    parts = sorted(((_bytes(path), path.name) for path in site.iterdir()), reverse=True)[:LARGEST]
    return {"prefix_mb": _mb(_bytes(image.prefix)), "largest_mb": {name: _mb(taken) for taken, name in parts}}


def _bytes(path: Path) -> int:
    files = [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()] if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files)


def _mb(taken: int) -> float:
    return round(taken / 1e6, 1)


def starts(image: Image, count: int) -> dict[str, object]:
    """Medians, with the least and the most."""
    cache = image.folder / "cache"
    compiled = [image.prefix / "bin" / "python", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*compiled, image.prefix / "lib"], env={**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}, check=True)
    plain = {"PYTHONPYCACHEPREFIX": str(cache)}
    return {
        "live": _starts(image, count, "/livez"),
        "live, no control": _starts(image, count, "/livez", SIDECAR_CONTROL="off"),
        "live, plain base": _starts(image, count, "/livez", **plain),
        "first answer": _starts(image, count, "/v1/chat/completions"),
    }


def _starts(image: Image, count: int, path: str, **more: str) -> dict[str, float]:
    took_s, cpu_s, rss = [], [], []
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}).encode()
    for _ in range(count):
        listen, admin, control = (f"127.0.0.1:{free_port()}" for _ in range(3))
        with image.engine() as engine:
            settings = {"SIDECAR_LISTEN": listen, "SIDECAR_ADMIN": admin, "SIDECAR_CONTROL": control}
            settings |= {"SIDECAR_UPSTREAM": f"http://{engine}", "SIDECAR_LOG_FORMAT": "json"}
            with image.started(*image.command("CMD"), **settings | more) as running:
                if path == "/livez":
                    running.answers(f"http://{admin}{path}")
                else:
                    running.answers(f"http://{listen}{path}", body)
                took_s.append(running.took_s)
                cpu_s.append(running.cpu_s)
                rss.append(running.rss_bytes / 1e6)
    return {
        "median_ms": round(1000 * statistics.median(took_s)),
        "least_ms": round(1000 * min(took_s)),
        "most_ms": round(1000 * max(took_s)),
        "cpu_ms": round(1000 * statistics.median(cpu_s)),
        "rss_mb": round(statistics.median(rss)),
    }


if __name__ == "__main__":
    sys.exit(main())
