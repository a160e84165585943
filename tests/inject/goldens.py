"""What `sidecar inject` makes of the manifests in `specs/`: kept in `golden/`, by `python -m tests.inject.goldens`.

Read the difference before it is committed: it is what users will see in their clusters.
"""

import sys
from pathlib import Path

from sidecar.inject.documents import Outcome, injected
from sidecar.inject.pod import Defaults

HERE = Path(__file__).parent
SPECS = sorted((HERE / "specs").glob("*.yaml"))


def outcome(path: Path) -> Outcome:
    """What becomes of a manifest."""
    return injected([(path.name, path.read_bytes().decode())], Defaults())


def golden(path: Path) -> tuple[Path, Path]:
    """Where the text that it becomes is kept, and what is said of it."""
    return HERE / "golden" / path.name, (HERE / "golden" / path.name).with_suffix(".warnings")


def main() -> int:
    """Writes all of them; the exit code."""
    for path in SPECS:
        done = outcome(path)
        if done.problems:
            print(*done.problems, sep="\n", file=sys.stderr)
            return 1
        text, warnings = golden(path)
        text.write_bytes(done.texts[0].encode())
        warnings.write_text("".join(f"{each}\n" for each in done.warnings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
