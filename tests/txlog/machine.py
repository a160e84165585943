"""The world of `world` as a hypothesis state machine: what happens is drawn, shrunk when it breaks something, replayed.

Most draws are of what goes on all the time; faults are rarer, or nothing would ever be agreed on between them.
"""

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidecar.core.breaker import Action
from sidecar.kernel.outcome import Result
from sidecar.txlog.codec import shard_of
from sidecar.txlog.local import LocalStore
from tests.txlog.world import KEYS, NAMES, SKEW_MS, Fate, Reading, Reload, Sidecar, Strange, World

sidecars = st.integers(0, len(NAMES) - 1)
keys = st.sampled_from(KEYS)
fates: st.SearchStrategy[Fate] = st.sampled_from(("done",) * 8 + ("lost", "unheard", "half", "late"))
readings: st.SearchStrategy[Reading] = st.sampled_from(("whole",) * 5 + ("part", "twice", "reversed", "hole"))
strange: st.SearchStrategy[Strange] = st.sampled_from(("fits", "stale", "again", "ahead", "result", "lease"))
results = st.sampled_from([Result.SUCCESS] * 3 + [Result.FAILURE, Result.IGNORED])
actions: st.SearchStrategy[Action] = st.sampled_from(("open", "close", "reset", "hold"))
reloads: st.SearchStrategy[Reload] = st.sampled_from(("as it was", "fewer", "floor", "off"))
spans_ms = st.sampled_from([1, 20, 300, 1100, 2500, 6000, 31_000, 61_000, 130_000])


class Fleet(RuleBasedStateMachine):
    """Three sidecars and a server. A subclass may break one of them (`store`, `sidecar`)."""

    store: type[LocalStore] = LocalStore
    sidecar: type[Sidecar] = Sidecar
    steps = 0
    """Of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.store, sidecar=self.sidecar)

    @initialize(
        quorum=st.integers(1, 2), probes=st.integers(1, 2), successes=st.integers(1, 3), seed=st.integers(0, 1 << 16)
    )
    def begin(self, quorum: int, probes: int, successes: int, seed: int) -> None:
        self.world = World(
            self.store, sidecar=self.sidecar, quorum=quorum, probes=probes, successes=successes, seed=seed
        )
        for i in range(len(NAMES)):
            self.world.come_up(i)

    # --- what goes on all the time ------------------------------------------------------------------------------------

    @rule(i=sidecars, key=keys, proofs=st.sampled_from([0, 0, 0, 6]))
    def fail(self, i: int, key: str, proofs: int) -> None:
        self.world.fail(i, key, proofs)

    @rule(i=sidecars, key=keys)
    def request(self, i: int, key: str) -> None:
        self.world.request(i, key)

    @rule(i=sidecars, which=st.integers(0, 7), result=results)
    def end(self, i: int, which: int, result: Result) -> None:
        self.world.end(i, which, result)

    @rule(i=sidecars, fate=fates)
    def write(self, i: int, fate: Fate) -> None:
        self.world.write(i, fate)

    @rule(i=sidecars, reading=readings)
    def read(self, i: int, reading: Reading) -> None:
        self.world.read(i, reading)

    @rule(i=sidecars, fate=fates, reading=readings)
    def talk(self, i: int, fate: Fate, reading: Reading) -> None:
        self.world.come_up(i)
        self.world.write(i, fate)
        self.world.read(i, reading)

    @rule(i=sidecars, fate=fates)
    def beat(self, i: int, fate: Fate) -> None:
        self.world.beat(i, fate)
        self.world.come_up(i)

    @rule(ms=spans_ms)
    def passes(self, ms: int) -> None:
        self.world.passes(ms)

    @rule(i=sidecars, key=keys, result=results, ms=spans_ms, number=st.integers(0, 5))
    def probe(self, i: int, key: str, result: Result, ms: int, number: int) -> None:
        """What takes many draws to happen in a row: a wait is over, somebody asks, is lent a probe and uses it."""
        world = self.world
        for _ in range(2):
            world.request(i, key)
            world.passes(600)
            world.write(i)
            world.read(i)
        if number:
            world.stranger("result", key, number)
        world.passes(ms)
        world.end(i, -1, result)
        world.write(i)

    @rule(key=keys, ask=st.booleans())
    def spend(self, key: str, ask: bool) -> None:
        """Probes come to nothing, one after another, until none is left to be lent."""
        for _ in range(30):
            for i in range(len(NAMES)):
                self.world.request(i, key)
                self.world.write(i)
                self.world.end(i, -1, Result.IGNORED)
                self.world.write(i)
            self.world.passes(510)

    # --- what is rarer ------------------------------------------------------------------------------------------------

    @rule(i=sidecars, key=keys, action=actions, for_s=st.sampled_from([inf, 3.0]), defied=st.booleans())
    def order(self, i: int, key: str, action: Action, for_s: float, defied: bool) -> None:
        self.world.order(i, key, action, for_s)
        if defied:
            self.world.write(i)
            self.world.stranger("fits", key, 0)

    @rule(i=sidecars, what=st.sampled_from(["share", "sleep", "die", "cut", "join", "join"]), ms=spans_ms)
    def happens(self, i: int, what: str, ms: int) -> None:
        world = self.world
        match what:
            case "share":
                world.share(i)
            case "sleep":
                world.sleep(i, ms)
            case "die":
                world.die(i)
            case _:
                world.cut(i, what == "cut")

    @rule(i=sidecars, how=reloads)
    def reload(self, i: int, how: Reload) -> None:
        self.world.reload(i, how)

    @rule(what=st.sampled_from(["deliver", "repeat", "flush", "failover", "trim"]), key=keys, number=st.integers(0, 40))
    def goes_wrong(self, what: str, key: str, number: int) -> None:
        world = self.world
        match what:
            case "deliver":
                world.deliver()
            case "repeat":
                world.repeat(number)
            case "flush":
                world.flush()
            case "failover":
                world.failover(number % 6, (number % 3 - 1) * SKEW_MS)
            case _:
                world.trim(shard_of(key), 1 + number % 3)

    @rule(what=strange, key=keys, number=st.integers(0, 5))
    def stranger(self, what: Strange, key: str, number: int) -> None:
        self.world.stranger(what, key, number)

    @rule(key=keys, number=st.integers(0, 5))
    def merge(self, key: str, number: int) -> None:
        """Two records of one version."""
        self.world.stranger("fits", key, 0)
        self.world.stranger("tie", key, number)

    @rule(key=keys)
    def snapshot(self, key: str) -> None:
        self.world.snapshot(key)

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @invariant()
    def nobody_goes_back(self) -> None:
        Fleet.steps += 1
        self.world.check()

    def teardown(self) -> None:
        self.world.close()
