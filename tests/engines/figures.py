"""What engine tests measured, kept for docs/engines.md: a line of JSON each in `build/engines/figures.jsonl`."""

import json
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "build" / "engines" / "figures.jsonl"


def note(what: str, **figures: object) -> None:
    """Adds a line; seconds are rounded to what is worth reading."""
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, **rounded}) + "\n")
