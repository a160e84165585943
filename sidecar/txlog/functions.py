"""The server's functions, ready to load, and calls as what they take.

`functions.lua` says the rules once. Their numbers come from `store` and `codec` alone: they are written before the text
as Lua's constants. Behind it comes the way in: as a library of functions, or, where functions are missing (Redis before
7) or forbidden, as one script for each.

1. The library's name has the version of how calls are packed and a hash of the whole text. So two releases whose rules
   differ live side by side on one server, and nobody has to remember to count up a number. A library that nobody calls
   any more is some 25 KB.
2. A call's numbers travel as one packed string: the client packs nine arguments less, and the server parses them once.
3. All keys of a call are declared and share the shard's hash tag: Redis Cluster asks for it.
"""

import hashlib
import struct
from binascii import crc_hqx
from functools import cache
from importlib.resources import files
from typing import Final, assert_never

import msgspec

from sidecar.core.breaker import MOST_TIMES
from sidecar.txlog import codec, store
from sidecar.txlog.codec import SHARDS, budget_shard, parse_key, route_key, shard_of
from sidecar.txlog.store import (
    MAX_WINDOWS,
    Ask,
    Beat,
    Call,
    Draw,
    Propose,
    Release,
    Renew,
    Report,
    Restore,
    Share,
    cut,
)

PACKING: Final = 1
"""Counted up whenever the way in which calls are packed changes."""

SLOTS: Final = 1 << 14
"""Of a Redis Cluster."""

NAMES: Final = ("propose", "ask", "report", "renew", "release", "restore", "beat", "share", "draw")

_FROM_STORE: Final = (
    "SUSPECT_MS",
    "MOST_PROBES",
    "PATIENCE_MS",
    "TOTAL_PER_NEEDED",
    "TOTAL_SLACK",
    "MAX_DOUBLINGS",
    "CLOSED_TTL_MS",
    "OPEN_TTL_MS",
    "MEMBER_TTL_MS",
    "PURGE",
    "GONE_SLACK_MS",
    "LOG_RECORDS",
    "LOG_BYTES",
    "EVIDENCE_BYTES",
    "EVIDENCE_OVERHEAD",
    "SPAN_PARTS",
    "DRAWER_TTL_MS",
    "MOST_DRAWN",
    "MAX_WINDOWS",
    "MIN_SPAN_MS",
    "MAX_SPAN_MS",
)

_PROPOSE: Final = struct.Struct(">BBBBBBHIQQIIIIIII")
_ASK: Final = struct.Struct(">III")
_REPORT: Final = struct.Struct(">IQQBBIII")
_RENEW: Final = struct.Struct(">IQQI")
_RELEASE: Final = struct.Struct(">IQQ")
_DRAW: Final = struct.Struct(">QQQ")
_WINDOW: Final = struct.Struct(">BIQQQQQQ")
_NEUTRAL: Final = 2
_MAX_U32: Final = 0xFFFF_FFFF


class Library(msgspec.Struct, frozen=True):
    """The functions under one name. `scripts` and `hashes` are by function: text, and SHA-1 as EVALSHA wants it."""

    name: str
    code: str
    scripts: dict[str, str]
    hashes: dict[str, bytes]


@cache
def library() -> Library:
    """The functions of this release."""
    text = files("sidecar.txlog").joinpath("functions.lua").read_text(encoding="utf-8")
    constants = {
        "SCHEMA": codec.SCHEMA,
        "HEAD_BYTES": codec.HEAD.size,
        "MAX_EXACT": codec.MAX_EXACT,
        "MOST_TIMES": MOST_TIMES,
        **{name: getattr(store, name) for name in _FROM_STORE},
    }
    body = "".join(f"local {name} = {value}\n" for name, value in constants.items()) + text
    name = f"dtl_{PACKING}_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
    register = "".join(f"redis.register_function('{name}_{each}', functions.{each})\n" for each in NAMES)
    # Before Redis 7 a script that read the clock may write only if it is replicated by what it did.
    effects = "if redis.replicate_commands then redis.replicate_commands() end\n"
    scripts = {script: f"{effects}{body}return functions.{script}(KEYS, ARGV)\n" for script in NAMES}
    hashes = {
        script: hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest().encode()
        for script, code in scripts.items()
    }
    return Library(name, f"#!lua name={name}\n{body}{register}", scripts, hashes)


def slot_of(tag: bytes) -> int:
    """The slot of Redis Cluster that keys with this hash tag, in its braces, are in."""
    return crc_hqx(tag[1 : tag.index(b"}")], 0) % SLOTS


class Shard:
    """The names of a shard's keys."""

    __slots__ = ("age", "evidence", "log", "n", "registers", "tag")

    def __init__(self, prefix: str, shard: int) -> None:
        self.tag = tag = f"{{{prefix}:{shard:02d}}}".encode()
        self.registers = tag + b":regs"
        self.log = tag + b":log"
        self.n = tag + b":n"
        self.age = tag + b":age"
        self.evidence = tag + b":evidence"

    def keys(self, key: bytes, service: bytes) -> tuple[bytes, ...]:
        """What a function that works on a register may touch, as functions.lua numbers it."""
        tag = self.tag
        return (
            self.registers,
            self.log,
            self.n,
            self.age,
            b"%b:open:%b" % (tag, service),
            b"%b:suspects:%b" % (tag, key),
            b"%b:probes:%b" % (tag, key),
            b"%b:leases:%b" % (tag, key),
        )

    def budget(self, key: bytes) -> tuple[bytes, ...]:
        """What is kept of a tenant's budget, who draws on it, and who has slots of it."""
        tag = self.tag
        return tag + b":" + key, b"%b:drawers:%b" % (tag, key), b"%b:slots:%b" % (tag, key)


Command = tuple[bytes, ...]
"""A command and its arguments."""


class Packer:
    """Calls as commands, under one prefix. `functions` says whether the library is called, or the scripts are."""

    __slots__ = ("_members", "_ways", "has_functions", "shards")

    def __init__(self, prefix: str, *, functions: bool) -> None:
        self.has_functions = functions
        self.shards = [Shard(prefix, shard) for shard in range(SHARDS)]
        self._members = self.shards[0].tag + b":members"
        it = library()
        self._ways: dict[str, tuple[bytes, bytes]] = {
            name: (b"FCALL", f"{it.name}_{name}".encode()) if functions else (b"EVALSHA", it.hashes[name])
            for name in NAMES
        }

    def pack(self, call: Call) -> tuple[int, Command]:
        """The shard that a call goes to, and the command."""
        match call:
            case Propose():
                numbers = _PROPOSE.pack(
                    call.kind,
                    call.state,
                    call.order,
                    call.held,
                    call.doublings,
                    call.overwhelming,
                    call.proofs,
                    call.epoch,
                    call.version,
                    call.expires_us,
                    call.wait_ms,
                    call.base_ms,
                    call.max_ms,
                    call.ramp_ms,
                    call.size,
                    call.minimum,
                    call.quorum,
                )
                words = (call.tx, call.body, call.by.encode(), call.suspect_tx)
                return self._on_register("propose", call.key, numbers, *words)
            case Ask():
                numbers = _ASK.pack(call.lease_ms, call.probes, call.successes)
                bodies = (call.tx, call.body, call.reopened_tx, call.reopened_body)
                return self._on_register("ask", call.key, numbers, *bodies)
            case Report():
                numbers = _REPORT.pack(
                    call.epoch,
                    call.version,
                    call.seq,
                    _NEUTRAL if call.ok is None else call.ok,
                    call.again,
                    call.lease_ms,
                    call.probes,
                    call.successes,
                )
                return self._on_register("report", call.key, numbers, call.tx, call.closed_body, call.reopened_body)
            case Renew():
                numbers = _RENEW.pack(call.epoch, call.version, call.seq, call.lease_ms)
                return self._on_register("renew", call.key, numbers)
            case Release():
                numbers = _RELEASE.pack(call.epoch, call.version, call.seq)
                return self._on_register("release", call.key, numbers, call.tx, call.body)
            case Restore():
                return self._on_register("restore", call.key, call.record)
            case Beat():
                return 0, (*self._ways["beat"], b"1", self._members, call.by.encode())
            case Share():
                shard = shard_of(route_key(call.service))
                evidence = self.shards[shard].evidence
                return shard, (*self._ways["share"], b"1", evidence, call.blob, b"%d" % call.keep_ms)
            case Draw():
                shard = budget_shard(call.key)
                keys = self.shards[shard].budget(call.key.encode())
                return shard, (*self._ways["draw"], b"3", *keys, _numbers(call), call.by.encode())
            case _:
                assert_never(call)

    def _on_register(self, name: str, key: str, *words: bytes) -> tuple[int, Command]:
        shard = shard_of(key)
        named = key.encode()
        keys = self.shards[shard].keys(named, parse_key(key)[1].encode())
        return shard, (*self._ways[name], b"8", *keys, named, *words)


def _numbers(call: Draw) -> bytes:
    """A draw's numbers; one window more than there may be is enough to see that they are too many."""
    packed = _DRAW.pack(cut(call.slots_limit), cut(call.slots_used), cut(call.slots_want))
    for window in call.windows[: MAX_WINDOWS + 1]:
        packed += _WINDOW.pack(
            window.unit,
            min(max(window.span_ms, 0), _MAX_U32),
            cut(window.limit),
            cut(window.must),
            cut(window.want),
            cut(window.give_back),
            cut(window.least),
            min(max(window.give_back_us, 0), codec.MAX_EXACT),
        )
    return packed
