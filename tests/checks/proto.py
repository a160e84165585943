"""The generated code of the descriptor stream's protocol: `make proto` writes it, `make lint` holds it to the file.

Only the messages are generated, and their types. The file that protoc would add for the service imports its messages
from where the protocol's package would lie among Python's, so the few lines that register the service are our own
(`sidecar/control/server.py`).
"""

import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTO = "sidecar/control/v1/control.proto"
PLACE = Path("sidecar", "control", "pb")


def generated(root: Path) -> dict[str, str]:
    """The files that the protocol makes, by name. ValueError if it is none: protoc has said why on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        said = protoc.main(
            [
                "protoc",
                f"--proto_path={root / 'proto'}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                PROTO,
            ]
        )
        if said != 0:
            raise ValueError(f"proto/{PROTO} is refused by protoc")
        made = Path(folder, PROTO).parent
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(made.iterdir())}


def drift(root: Path) -> Iterator[str]:
    """What of the generated code is not what the protocol says. Where there is no protocol there is none."""
    if not (root / "proto" / PROTO).is_file():
        return
    for name, text in generated(root).items():
        path = root / PLACE / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield f"{(PLACE / name).as_posix()} is not what proto/{PROTO} says: run `make proto`"


def main(root: Path = ROOT) -> int:
    """Writes the generated code."""
    for name, text in generated(root).items():
        (root / PLACE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
