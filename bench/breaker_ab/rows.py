"""One run of one arm, as a line of JSON: what was run, and everything that was counted."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from time import process_time
from typing import Any

import msgspec

from bench.breaker_ab.arms import ARMS
from bench.breaker_ab.scenarios import SCENARIOS
from sidecar.simulate.ledger import Measures
from sidecar.simulate.profile import PROFILES
from sidecar.simulate.run import simulate


class Setting(msgspec.Struct, frozen=True):
    """The traffic and who sees it. `pooled`: sidecars tell each other what they saw."""

    profile: str = "chat"
    rate: float = 10.0
    pods: int = 9
    sidecars: int = 1
    pooled: bool = False

    def __str__(self) -> str:
        who = f"{self.sidecars} sidecar{'s' if self.sidecars > 1 else ''}{', pooled' if self.pooled else ''}"
        return f"{self.profile}, {self.rate:g} requests/s and pod, {self.pods} pod{'s' * (self.pods > 1)}, {who}"


class Task(msgspec.Struct, frozen=True):
    """One run to make; its arm and scenario by name, so that it can go to another process."""

    arm: str
    scenario: str
    seed: int
    setting: Setting


class Row(msgspec.Struct, frozen=True):
    """One run. Of its moves only the false trips are kept."""

    task: Task
    cpu_s: float
    measures: Measures


def tasks(arms: Iterable[str], scenarios: Iterable[str], seeds: Iterable[int], setting: Setting) -> list[Task]:
    """All combinations, seed by seed: what is stopped early has compared all arms on fewer seeds."""
    names, cases = [*arms], [*scenarios]
    return [Task(arm, case, seed, setting) for seed in seeds for case in cases for arm in names]


def once(task: Task, adaptive: Mapping[str, Any]) -> Row:
    setting, begun = task.setting, process_time()
    measures = simulate(
        ARMS[task.arm].factory(adaptive, pooled=setting.pooled),
        SCENARIOS[task.scenario],
        task.seed,
        pods=setting.pods,
        sidecars=setting.sidecars,
        rate=setting.rate,
        profile=PROFILES[setting.profile],
    )
    kept = msgspec.structs.replace(measures, moves=tuple(move for move in measures.moves if move.false))
    return Row(task, round(process_time() - begun, 3), kept)


def run_all(todo: list[Task], adaptive: Mapping[str, Any], jobs: int, done: Callable[[Row], None]) -> None:
    """Runs them in `jobs` processes; `done` hears of each as it ends."""
    if jobs == 1:
        for task in todo:
            done(once(task, adaptive))
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(once, task, adaptive) for task in todo]):
                done(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def line(row: Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def read(path: Path) -> Iterator[Row]:
    """The rows of a file; what a run that was killed left of its last line is left out."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Row)
    for each in path.read_bytes().split(b"\n")[:-1]:
        yield decoder.decode(each)
