"""The image's bill of materials (CycloneDX): what `requirements.lock` installs, as cyclonedx-py reads it.

    python -m tests.checks.sbom CYCLONEDX_PY OUT

1. It is of an environment that is made for it, so licences and what needs what are there. The packages of the base
   image are not: whoever scans images finds those.
2. Made twice it is the same, byte for byte: no serial number and no time.
3. It is written only if it has every pin of the lock file, and nothing else.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tests.checks import lock


def main(tool: str, out: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        venv.create(folder, symlinks=True)
        install = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
        install += ["install", "--require-hashes", "--only-binary", ":all:", "--no-compile", "-r", lock.RUN]
        subprocess.run(install, cwd=lock.ROOT, check=True)
        read = [
            tool,
            "environment",
            "--output-reproducible",
            "--output-format",
            "JSON",
            "--pyproject",
            "pyproject.toml",
        ]
        done = subprocess.run([*read, str(python)], cwd=lock.ROOT, stdout=subprocess.PIPE, check=True)
    pins, _ = lock.pins((lock.ROOT / lock.RUN).read_text(encoding="utf-8"))
    faults = differences(json.loads(done.stdout), pins)
    for fault in faults:
        print(f"sbom: {fault}", file=sys.stderr)
    if not faults:
        path = Path(out)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(done.stdout)
        print(f"{out}: {len(pins)} packages")
    return 1 if faults else 0


def differences(bill: dict[str, Any], pins: lock.Pins) -> list[str]:
    """What is in one of the two alone."""
    listed = {(str(canonicalize_name(each["name"])), each["version"]) for each in bill.get("components", ())}
    pinned = {(name, version) for name, (version, _) in pins.items()}
    return [
        *(f"{name} {version} is not in the bill" for name, version in sorted(pinned - listed)),
        *(f"{name} {version} is not in {lock.RUN}" for name, version in sorted(listed - pinned)),
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
