"""Runs as rows: every policy on the same requests, with the flood and without; one row is one of them."""

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context

import msgspec

from bench.qos.gated import GATED
from bench.qos.plain import PLAIN
from bench.qos.stage import Counted, Policy, Stage
from bench.qos.traffic import ENGINE, KINDS, requests
from bench.qos.whole import whole

PRODUCT, WHOLE = "product", "product, whole"
OURS = (PRODUCT, "product, by class", "product, quotas")
"""Those that are held against the aims."""
POLICIES: dict[str, Callable[[Stage], Policy]] = {
    **PLAIN,
    **GATED,
    WHOLE: whole(limit="fixed", concurrency=ENGINE.slots),
}
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
WHOLE_LOADS = (1.0, 2.0)
"""Of the whole pipeline, which takes four times as long: it is there to give the same figures."""
SECONDS = 150.0
EVALUATION = 100_000
"""The first seed of those by which no number of the product was chosen; tuning takes lower ones."""
SEEDS = 3
EVERYWHERE = "all"
NOWHERE = "none"
FLOODS = (EVERYWHERE, *(kind.name for kind in KINDS))
"""In which classes the tenant floods."""


class Task(msgspec.Struct, frozen=True):
    """A run. `flood`: a name of FLOODS, or "none"."""

    policy: str
    load: float
    seed: int
    flood: str
    seconds: float


class Row(msgspec.Struct, frozen=True):
    """A run and what it counted."""

    task: Task
    counted: Counted


def tasks(
    policies: Sequence[str], loads: Sequence[float], seeds: Sequence[int], seconds: float, *, floods_apart: bool
) -> list[Task]:
    """All runs of a table; a seed is whole before the next begins. `floods_apart`: the product under floods of one
    class, too."""
    found = []
    for seed in seeds:
        for load in loads:
            for policy in policies:
                if policy == WHOLE and load not in WHOLE_LOADS:
                    continue
                floods = (NOWHERE, *(FLOODS if floods_apart and policy == PRODUCT and load >= 1.0 else FLOODS[:1]))
                found += [Task(policy, load, seed, flood, seconds) for flood in floods]
    return found


def play(task: Task) -> Row:
    """Runs one."""
    stage = Stage(task.seed, task.seconds)
    kinds = [number for number, kind in enumerate(KINDS) if task.flood in (EVERYWHERE, kind.name)]
    coming = requests(task.load, stage.until, task.seed, flood=task.flood != NOWHERE, kinds=kinds)
    return Row(task, stage.play(POLICIES[task.policy], coming))


def play_all(found: Sequence[Task], jobs: int) -> Iterator[Row]:
    """As they end."""
    if jobs <= 1:
        yield from map(play, found)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(play, found)
