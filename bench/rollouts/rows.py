"""Playing many rollouts on several processes; each is kept as it comes."""

from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

import msgspec

from bench.rollouts.play import Played, play
from bench.rollouts.scenarios import SCENARIOS

TUNING = range(1, 10_000)
"""Seeds that numbers of the product may be chosen by."""
EVALUATION = 100_000
"""The first seed of those that they may not."""


def play_all(tasks: Sequence[tuple[str, int]], jobs: int) -> Iterator[Played]:
    """Scenario and seed of each; as they end."""
    if jobs <= 1:
        yield from map(_play, tasks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_play, tasks, chunksize=8)


def read(path: Path) -> list[Played]:
    """The rows there; a broken last line is none."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(msgspec.json.decode(line, type=Played))
        except msgspec.MsgspecError:
            continue
    return found


def line(row: Played) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def _play(task: tuple[str, int]) -> Played:
    name, seed = task
    return play(SCENARIOS[name], seed)
