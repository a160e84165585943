"""What a server of the log may answer: the rules of `store`, each said once more and from the answers alone.

`Oracle.saw` is told of every call as the server did it, of its answer and of what the log got, and holds them against
the invariants of the log (numbered as in the design). It keeps no state of a store's but what answers said, so that it
judges any store, and a store whose rule is broken cannot lead it astray.

1 versions rise by one per key, of each version there is one; 2 legal edges only; 3 leases at a time and in all; 4 a
result of another version changes nothing; 5 a half-open register is never stuck; 9 the floor; 10 what changes is
appended, and nothing else; and no `tx` twice.
"""

import msgspec

from sidecar.core.breaker import Scope
from sidecar.txlog.codec import SHARDS, Code, Kind, Record, decode, parse_key, shard_of
from sidecar.txlog.store import (
    CLOSED_TTL_MS,
    GONE_SLACK_MS,
    MAX_DOUBLINGS,
    MEMBER_TTL_MS,
    MOST_PROBES,
    OPEN_TTL_MS,
    PATIENCE_MS,
    SUSPECT_MS,
    TOTAL_PER_NEEDED,
    TOTAL_SLACK,
    Ask,
    Beat,
    Call,
    Draw,
    Propose,
    Release,
    Renew,
    Reply,
    Report,
    Restore,
    Share,
    Verdict,
)

CLOSED, HALF_OPEN, OPEN = Code.CLOSED, Code.HALF_OPEN, Code.OPEN

EDGES = {(CLOSED, OPEN), (OPEN, HALF_OPEN), (OPEN, CLOSED), (HALF_OPEN, OPEN), (HALF_OPEN, CLOSED)}

OF_CALL = {
    Propose: {
        Verdict.OK,
        Verdict.ALREADY,
        Verdict.STALE,
        Verdict.HELD,
        Verdict.ILLEGAL,
        Verdict.FLOOR,
        Verdict.SUSPECT,
    },
    Ask: {Verdict.CLOSED, Verdict.HELD, Verdict.WAIT, Verdict.GRANTED, Verdict.FULL, Verdict.REOPENED},
    Report: {Verdict.FENCED, Verdict.CLOSED, Verdict.PROVED, Verdict.NEUTRAL, Verdict.REOPENED},
    Renew: {Verdict.OK, Verdict.FENCED},
    Release: {Verdict.OK, Verdict.REOPENED, Verdict.FENCED},
    Restore: {Verdict.OK, Verdict.KEPT, Verdict.ILLEGAL},
}


class Seen:
    """A register as answers told of it."""

    def __init__(self, record: Record, data: bytes, now_us: int) -> None:
        self.record = record
        self.data = data
        self.touched_us = now_us
        self.since_us = now_us
        self.out: dict[int, int] = {}
        self.granted = 0
        self.good = 0
        self.refused = 0

    def held(self, now_us: int) -> bool:
        return self.record.held and (not self.record.expires_us or now_us < self.record.expires_us)

    def live(self, now_us: int) -> int:
        return sum(1 for expires_us in self.out.values() if expires_us > now_us)

    def lost(self, now_us: int) -> bool:
        return self.live(now_us) < len(self.out)

    def needed(self, successes: int) -> int:
        return max(successes, self.record.proofs * min(2, 1 + self.record.doublings))

    def total(self, successes: int) -> int:
        return TOTAL_PER_NEEDED * self.needed(successes) + TOTAL_SLACK

    def at_a_time(self, probes: int, successes: int) -> int:
        needed = self.needed(successes)
        most = max(probes, MOST_PROBES) if self.good and needed > successes else probes
        return min(most, max(1, needed - self.good))

    def used_up(self, successes: int) -> bool:
        return not self.out and self.granted >= self.total(successes)

    def outlived(self, now_us: int) -> bool:
        ttl_ms = CLOSED_TTL_MS if self.record.state == CLOSED else OPEN_TTL_MS + 2 * self.record.max_ms
        return not self.held(now_us) and now_us >= self.touched_us + ttl_ms * 1000

    def gone(self, now_us: int) -> bool:
        after_us = (2 * self.record.max_ms + GONE_SLACK_MS) * 1000
        return not self.held(now_us) and now_us >= self.touched_us + after_us


class Oracle:
    """Judges one server, from when it was empty. `AssertionError` at the first answer that may not be."""

    def __init__(self) -> None:
        self.registers: dict[str, Seen] = {}
        self.n = [0] * SHARDS
        self.txs: set[bytes] = set()
        self.last: dict[str, tuple[int, int]] = {}
        self.suspects: dict[str, dict[str, int]] = {}
        self.members: dict[str, int] = {}
        self.verdicts: dict[Verdict, int] = {}

    def saw(self, call: Call, reply: Reply, appended: list[bytes]) -> None:
        """A call, its answer, and what the log of its shard got by it."""
        self.verdicts[reply.verdict] = self.verdicts.get(reply.verdict, 0) + 1
        now = reply.now_us
        if isinstance(call, Share | Draw):
            assert (reply.verdict, appended) == (Verdict.OK, [])
            return
        if isinstance(call, Beat):
            self.members[call.by] = now
            self.members = {by: at for by, at in self.members.items() if now - at < MEMBER_TTL_MS * 1000}
            assert (reply.verdict, reply.ms, appended) == (Verdict.OK, len(self.members), [])
            return
        assert reply.verdict in OF_CALL[type(call)], f"{reply.verdict} is no answer to {type(call).__name__}"
        seen = self._before(call, reply, now)
        changed = reply.record != (b"" if seen is None else seen.data)
        self._appended(call, reply, changed, appended)
        after = decode(reply.record) if changed else None
        if after is not None:
            self._follows(call, seen, after, now)
        match call:
            case Propose():
                self._propose(call, reply, seen, after, now)
            case Ask():
                self._ask(call, reply, seen, after, now)
            case Report():
                self._report(call, reply, seen, after, now)
            case Renew():
                self._renew(call, reply, seen, after, now)
            case Release():
                self._release(call, reply, seen, after, now)
            case Restore():
                self._restore(call, reply, seen, after)
        if after is not None:
            fresh = self.registers[call.key] = Seen(after, reply.record, now)
            if after.state == HALF_OPEN and isinstance(call, Ask):
                fresh.granted = 1
                fresh.out[1] = now + call.lease_ms * 1000
            if after.state != CLOSED:
                self.suspects.pop(call.key, None)

    def closed(self, keys: list[str], now_us: int) -> int:
        """How many of these are closed, or gone."""
        return sum(1 for key in keys if self._state(self.registers.get(key)) == CLOSED or self._gone(key, now_us))

    def _before(self, call: Propose | Ask | Report | Renew | Release | Restore, reply: Reply, now: int) -> Seen | None:
        """The register before the call, unless the server has forgotten it, as it may."""
        seen = self.registers.get(call.key)
        if seen is None or reply.record == seen.data:
            return seen
        made_anew = False
        if reply.verdict is Verdict.OK and seen.outlived(now):
            made = decode(reply.record)
            back = (made.epoch, made.version) <= (seen.record.epoch, seen.record.version)
            made_anew = (isinstance(call, Propose) and made.version == 1) or (isinstance(call, Restore) and back)
        if reply.record and not made_anew:
            return seen
        assert seen.outlived(now), f"{call.key} was forgotten before its time"
        del self.registers[call.key]
        return None

    def _appended(self, call: Call, reply: Reply, changed: bool, appended: list[bytes]) -> None:
        if changed:
            assert appended == [reply.record], "10: what was written is not what was appended"
        elif reply.verdict is Verdict.SUSPECT:
            assert [decode(data).kind for data in appended] in ([], [Kind.SUSPECT])
        else:
            assert appended == [], f"10: {reply.verdict} changed nothing, and was appended"
        for data in appended:
            record = decode(data)
            shard = shard_of(record.key)
            assert record.n == (self.n[shard] + 1 if self.n[shard] else reply.now_us), (
                "10: the log's records are not numbered one by one"
            )
            self.n[shard] = record.n
            told_again = record.kind == Kind.OVERRIDE or isinstance(call, Restore)
            assert told_again or record.tx not in self.txs, "8: a tx twice"
            self.txs.add(record.tx)

    def _follows(self, call: Call, seen: Seen | None, after: Record, now: int) -> None:
        version = (after.epoch, after.version)
        if after.key in self.last and not isinstance(call, Restore):
            assert version > self.last[after.key], "1: the version did not rise"
        if not isinstance(call, Restore):
            assert after.ts_us == now, "the time is not the server's"
            if seen is None:
                assert after.version == 1, "1: a new register does not begin at 1"
            else:
                before = (seen.record.epoch, seen.record.version)
                assert version == (before[0], before[1] + 1), "1: the versions are not contiguous"
        elif seen is not None:
            assert version > (seen.record.epoch, seen.record.version), "1: the version did not rise"
        self.last[after.key] = version
        ordered = isinstance(call, Restore) or after.kind != Kind.TRANSITION
        if not ordered:
            assert (self._state(seen), after.state) in EDGES, "2: no legal edge"

    def _propose(self, call: Propose, reply: Reply, seen: Seen | None, after: Record | None, now: int) -> None:
        state = self._state(seen)
        route = call.kind == Kind.ROUTE
        expected = seen is None or (seen.record.epoch, seen.record.version) == (call.epoch, call.version)
        legal = route or (state == CLOSED and call.state == OPEN) or (state != CLOSED and call.state == CLOSED)
        repeated = seen is not None and seen.record.tx == call.tx
        opens = not route and call.state == OPEN
        node = parse_key(call.key)[0] == Scope.NODE
        low = opens and node and bool(call.minimum) and self._left(call, now) < call.minimum
        few = opens and not call.overwhelming and self._observers(call, now) < call.quorum
        if repeated:
            right = Verdict.ALREADY
        elif call.order:
            right = Verdict.OK
        elif not expected:
            right = Verdict.STALE
        elif seen is not None and seen.held(now):
            right = Verdict.HELD
        elif not legal:
            right = Verdict.ILLEGAL
        elif low:
            right = Verdict.FLOOR
        elif few:
            right = Verdict.SUSPECT
        else:
            right = Verdict.OK
        assert reply.verdict is right, f"1-3, 9: {reply.verdict} where {right} is right"
        assert (after is not None) == (right is Verdict.OK), f"{right}, and it was written" if after else "not written"
        if right is Verdict.SUSPECT:
            observers = self.suspects.setdefault(call.key, {})
            if now - observers.get(call.by, -SUSPECT_MS * 1000) >= SUSPECT_MS * 1000:
                observers[call.by] = now
        if after is not None:
            assert (after.tx, after.state, after.held) == (call.tx, call.state, call.held)
            assert seen is not None or after.epoch == max(now // 1_000_000, call.epoch + 1), "1: the epoch"

    def _ask(self, call: Ask, reply: Reply, seen: Seen | None, after: Record | None, now: int) -> None:
        if seen is None or seen.record.state == CLOSED:
            assert reply.verdict is Verdict.CLOSED
        elif seen.held(now):
            assert reply.verdict is Verdict.HELD
        elif seen.record.state == OPEN:
            left_us = seen.record.ts_us + seen.record.wait_ms * 1000 - now
            assert reply.verdict is (Verdict.WAIT if left_us > 0 else Verdict.GRANTED)
            assert left_us <= 0 or reply.ms * 1000 >= left_us > (reply.ms - 1) * 1000
            if after is not None:
                assert (after.state, after.tx, reply.seq) == (HALF_OPEN, call.tx, 1)
        elif seen.lost(now):
            assert reply.verdict is Verdict.REOPENED, "5: a probe was lost, and it is half-open still"
            self._failed(seen, after, call.reopened_tx)
        elif seen.used_up(call.successes):
            assert reply.verdict is Verdict.REOPENED, "5: there is no probe left, and it is half-open still"
            self._opened(seen, after, call.reopened_tx, seen.record.wait_ms)
        elif reply.verdict is Verdict.GRANTED:
            self._granted(seen, reply.seq, call.probes, call.successes, call.lease_ms, now)
        else:
            assert reply.verdict is Verdict.FULL
            assert seen.live(now) >= min(call.probes, 1), "5: nobody has a probe, and none is given"
            assert seen.live(now) >= seen.at_a_time(call.probes, call.successes) or (
                seen.granted >= seen.total(call.successes)
            ), "3: a probe that might be given is not"
            seen.refused = seen.granted

    def _granted(self, seen: Seen, seq: int, probes: int, successes: int, lease_ms: int, now: int) -> None:
        assert seq == seen.granted + 1, "3: a probe twice"
        assert seen.live(now) < seen.at_a_time(probes, successes), "3: too many at a time"
        assert seen.granted < seen.total(successes), "3: too many in all"
        seen.granted = seq
        seen.out[seq] = now + lease_ms * 1000
        seen.touched_us = now

    def _report(self, call: Report, reply: Reply, seen: Seen | None, after: Record | None, now: int) -> None:
        if seen is None or not self._stands(call, seen, now):
            assert (reply.verdict, after) == (Verdict.FENCED, None), "4: a result that is none changed something"
            return
        assert reply.verdict is not Verdict.FENCED, "4: a result was fenced that counts"
        if call.ok is False or seen.lost(now):
            assert reply.verdict is Verdict.REOPENED
            self._failed(seen, after, call.tx)
            return
        del seen.out[call.seq]
        seen.good += call.ok is True
        patient = now - seen.since_us >= PATIENCE_MS * 1000
        if call.ok and seen.good >= (call.successes if patient else seen.needed(call.successes)):
            assert reply.verdict is Verdict.CLOSED
            assert after is not None
            assert (after.state, after.tx, after.wait_ms) == (CLOSED, call.tx, 0)
        elif seen.used_up(call.successes):
            assert reply.verdict is Verdict.REOPENED, "5: there is no probe left, and it is half-open still"
            self._opened(seen, after, call.tx, seen.record.wait_ms)
        else:
            assert (reply.verdict, after) == (Verdict.PROVED if call.ok else Verdict.NEUTRAL, None)
            if reply.seq:
                assert call.again and call.ok
                self._granted(seen, reply.seq, call.probes, call.successes, call.lease_ms, now)

    def _renew(self, call: Renew, reply: Reply, seen: Seen | None, after: Record | None, now: int) -> None:
        stands = seen is not None and self._stands(call, seen, now)
        assert (reply.verdict, after) == (Verdict.OK if stands else Verdict.FENCED, None), "4: a lease"
        if seen is not None and stands:
            assert reply.contended == (seen.refused >= call.seq)
            seen.out[call.seq] = now + call.lease_ms * 1000
            seen.touched_us = now

    def _release(self, call: Release, reply: Reply, seen: Seen | None, after: Record | None, now: int) -> None:
        if seen is None or not self._stands(call, seen, now):
            assert (reply.verdict, after) == (Verdict.FENCED, None), "4: a lease"
            return
        del seen.out[call.seq]
        stays = bool(seen.out or seen.good)
        assert reply.verdict is (Verdict.OK if stays else Verdict.REOPENED), "5: the last probe was given back"
        if not stays:
            self._opened(seen, after, call.tx, 0)

    def _restore(self, call: Restore, reply: Reply, seen: Seen | None, after: Record | None) -> None:
        record = decode(call.record)
        newer = seen is None or (record.epoch, record.version) > (seen.record.epoch, seen.record.version)
        wins = newer or (seen is not None and record.order > seen.record.order and record.tx != seen.record.tx)
        assert reply.verdict is (Verdict.OK if wins else Verdict.KEPT), "the later of two records is kept"
        assert (after is not None) == wins
        if after is not None:
            half_open = record.state == HALF_OPEN
            assert (after.epoch, after.tx) == (record.epoch, record.tx)
            assert after.version == record.version + (not newer or half_open)
            assert after.state == (OPEN if half_open else record.state), "5: a half-open register without a probe"

    def _stands(self, call: Report | Renew | Release, seen: Seen, now: int) -> bool:
        version = (seen.record.epoch, seen.record.version) == (call.epoch, call.version)
        return version and seen.record.state == HALF_OPEN and seen.out.get(call.seq, 0) > now

    def _failed(self, seen: Seen, after: Record | None, tx: bytes) -> None:
        doublings = min(seen.record.doublings + 1, MAX_DOUBLINGS)
        wait_ms = min(seen.record.max_ms, seen.record.base_ms << doublings)
        assert after is not None
        assert after.doublings == doublings
        self._opened(seen, after, tx, wait_ms)

    def _opened(self, seen: Seen, after: Record | None, tx: bytes, wait_ms: int) -> None:
        assert after is not None, "5: it is half-open still"
        assert (after.state, after.tx, after.wait_ms) == (OPEN, tx, wait_ms)

    def _left(self, call: Propose, now: int) -> int:
        """How many nodes would stay closed."""
        mine = [key for key in self.registers if parse_key(key)[:2] == (Scope.NODE, call.service) and key != call.key]
        return call.size - 1 - (len(mine) - self.closed(mine, now))

    def _observers(self, call: Propose, now: int) -> int:
        seen = self.suspects.get(call.key, {})
        return 1 + sum(1 for by, at in seen.items() if by != call.by and now - at < SUSPECT_MS * 1000)

    def _gone(self, key: str, now_us: int) -> bool:
        return self.registers[key].gone(now_us)

    @staticmethod
    def _state(seen: Seen | None) -> int:
        return CLOSED if seen is None else seen.record.state


class Op(msgspec.Struct):
    """One call as its caller saw it: when it was begun, when it was answered (infinity: never), and with what."""

    begun: float
    call: Call
    ended: float = float("inf")
    reply: Reply | None = None
