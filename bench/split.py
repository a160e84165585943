"""How exactly sessions split: `python -m bench.split [--ids N]`; minutes for the documents' 20 million.

Three figures of each: the share that a version got of so many ids, how far that is from its part, and how far chance
alone would have taken it (one standard deviation). What the split itself adds is shown exactly by
`tests/core/test_split.py`, as an integral over the hash's space; here is whether the hash is as even as that assumes.
Then one weight grows, and who moved from where to where is counted.
"""

import argparse
import time
from collections import Counter
from math import sqrt

from sidecar.core.split import rendezvous
from sidecar.core.table import PARTS, Table, Version, weighed
from sidecar.kernel.ids import SessionId, VersionName

SPLITS = ((9000, 1000), (8500, 1000, 500), (4000, 3000, 1500, 1000, 500))
GROWN = (5000, 2000, 3000)
"""Of which the second grows to half."""

Split = list[tuple[VersionName, float]]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="How exactly sessions split.")
    parser.add_argument("--ids", type=int, default=1_000_000, help="sessions of each split")
    ids = int(parser.parse_args().ids)
    for parts in SPLITS:
        shares(split_of(parts), ids)
    grows(ids // 10)


def split_of(parts: tuple[int, ...]) -> Split:
    """Versions of these parts."""
    return [(VersionName(f"v{number}"), float(part)) for number, part in enumerate(parts, 1)]


def shares(split: Split, ids: int) -> None:
    """What each version gets."""
    began = time.process_time()
    found = Counter(rendezvous(split, SessionId(f"session-{number}")) for number in range(ids))
    took_us = (time.process_time() - began) / ids * 1e6
    print(f"{len(split)} versions, {ids:,} sessions, {took_us:.2f} us each")
    for version, part in split:
        p = part / PARTS
        sigma = sqrt(p * (1 - p) / ids)
        off = found[version] / ids - p
        print(f"  {version}  {p:.4f}  got {found[version] / ids:.6f}  off {off:+.1e} = {off / sigma:+.1f} sigma")


def grows(ids: int) -> None:
    """Who moves when a weight grows from 0.2 to 0.5."""
    table = Table("chat", tuple(Version(name, int(part)) for name, part in split_of(GROWN)))
    made = weighed(table, "v2", PARTS // 2)
    assert made is not None
    before, after = (
        [(VersionName(version.name), float(version.weight)) for version in each.versions] for each in (table, made)
    )
    moved: Counter[str] = Counter()
    for number in range(ids):
        session = SessionId(f"session-{number}")
        old, new = rendezvous(before, session), rendezvous(after, session)
        moved["stayed" if old == new else f"{old} -> {new}"] += 1
    print(f"v2 grows from 0.2 to 0.5, {ids:,} sessions: {dict(sorted(moved.items()))}")
    print(f"  weights {table.weights} -> {made.weights}")


if __name__ == "__main__":
    main()
