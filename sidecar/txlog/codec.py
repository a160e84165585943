"""Records of the log as bytes: a fixed head that the server's functions write, then a body that only we read.

The head holds every number that the functions decide on (versions, waits, who holds what); the body holds words. So the
functions never parse what a writer made, and a record costs one `struct` and one msgpack decoding to read.

```
head  schema u8 | kind u8 | state u8 | held u8 | doublings u8 | proofs u16 | epoch u32 | version u64 | n u64 | ts_us u64
      | wait_ms u32 | base_ms u32 | max_ms u32 | ramp_ms u32 | expires_us u64 | tx 16 bytes              (big-endian)
body  msgpack array: key, service, by, why, evidence, blob, trace
```

1. The schema is the first byte of every record. A record of a schema that is not known here is `Unreadable`: whoever
   reads skips it, counts it and names it. A body may grow at its end: what is not known is ignored, what is missing has
   its default.
2. Records are ordered by (epoch, version, severity, tx). Two records with the same version and another `tx` exist only
   after a failover lost one of them; the order says which is kept, so that all who see both agree.
3. Numbers fit a double exactly: the functions are Lua.
"""

import re
import struct
from binascii import crc_hqx
from enum import IntEnum
from hashlib import blake2b
from typing import Final

import msgspec

from sidecar.core.breaker import Scope

SCHEMA: Final = 1
SHARDS: Final = 16
TX_BYTES: Final = 16
MAX_RECORD_BYTES: Final = 4096
"""A record is some 200 bytes; a longer one is not ours, or broken. A route's table has `MAX_TABLE_BYTES`."""
MAX_TABLE_BYTES: Final = 1 << 20

MAX_TENANT_BYTES: Final = 256
"""Of a budget's key: the server has it in memory, and clients choose it."""
BUDGET: Final = "budget"
"""The scope of a key that is a tenant's budget and no register's."""

HEAD: Final = struct.Struct(">BBBBBHIQQQIIIIQ16s")
MAX_U32: Final = 0xFFFF_FFFF
MAX_EXACT: Final = 1 << 53
"""The largest number that a double, and so Lua, holds with all below it."""


class Kind(IntEnum):
    """What a record says."""

    TRANSITION = 1
    """A breaker moved, on evidence, by its wait or by its probes."""
    OVERRIDE = 2
    """An operator's order; `held` while nothing but the next order, or `expires_us`, may move it."""
    SUSPECT = 3
    """One observer's evidence, too little to open for all. Its version is the register's, which stays as it was."""
    ROUTE = 4
    """A routing table, in `blob`."""


class Code(IntEnum):
    """A breaker's state. By severity: of two records of one version the more severe is kept."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Unreadable(ValueError):
    """Bytes that are no record of ours, or one of a schema that is not known; says which."""


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the functions pass on unread. New fields go to the end, with a default."""

    key: str
    service: str
    by: str
    why: str = ""
    evidence: str = ""
    blob: bytes = b""
    trace: str = ""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record. Times: `ts_us` and `expires_us` (0: never) are the server's clock in microseconds since the epoch.

    `epoch` is when the register was made (the server's seconds); `version` counts its changes since; `n` counts the
    records of its shard. `wait_ms` is how long an open breaker waits from `ts_us`, `base_ms` and `max_ms` its shortest
    and longest wait, `doublings` how often it doubled, `proofs` how many good probes its trip asked for, `ramp_ms` how
    long it takes from being closed to its full share. `tx` is of this record alone; `trace` is the trace id of the
    request that caused it, in hex, empty if there was none.
    """

    kind: int
    state: int
    epoch: int
    version: int
    tx: bytes
    key: str
    service: str
    by: str
    why: str = ""
    evidence: str = ""
    n: int = 0
    ts_us: int = 0
    held: bool = False
    doublings: int = 0
    proofs: int = 0
    wait_ms: int = 0
    base_ms: int = 0
    max_ms: int = 0
    ramp_ms: int = 0
    expires_us: int = 0
    blob: bytes = b""
    trace: str = ""

    @property
    def kind_word(self) -> str:
        """Its `Kind` as people read it."""
        return Kind(self.kind).name.lower()

    @property
    def state_word(self) -> str:
        """Its `Code` as people read it."""
        return Code(self.state).name.lower()

    @property
    def order(self) -> tuple[int, int, int, bytes]:
        """What says which of two records of one key is the later."""
        return self.epoch, self.version, self.state, self.tx


_KEY: Final = re.compile(f"(?:{'|'.join((*Scope, 'route'))}):[^/]+/")

_body_encoder: Final = msgspec.msgpack.Encoder()
_body_decoder: Final = msgspec.msgpack.Decoder(Body)


def encode_body(
    key: str, service: str, by: str, why: str = "", evidence: str = "", blob: bytes = b"", trace: str = ""
) -> bytes:
    """A record's words, as the functions take them."""
    return _body_encoder.encode(Body(key, service, by, why, evidence, blob, trace))


def encode_head(record: Record) -> bytes:
    """A record's numbers, as the functions write them before a body."""
    return HEAD.pack(
        SCHEMA,
        record.kind,
        record.state,
        record.held,
        record.doublings,
        record.proofs,
        record.epoch,
        record.version,
        record.n,
        record.ts_us,
        record.wait_ms,
        record.base_ms,
        record.max_ms,
        record.ramp_ms,
        record.expires_us,
        record.tx,
    )


def encode(record: Record) -> bytes:
    """A whole record, as the functions would write it."""
    words = (record.key, record.service, record.by, record.why, record.evidence, record.blob, record.trace)
    return encode_head(record) + encode_body(*words)


def decode(data: bytes) -> Record:
    """A record from its bytes. `Unreadable` for all that is none, or none of this schema."""
    if not data or data[0] != SCHEMA:
        raise Unreadable(f"schema {data[0]} is not known here" if data else "an empty record")
    if len(data) > MAX_TABLE_BYTES:
        raise Unreadable(f"{len(data)} bytes are too many for a record")
    try:
        (
            _,
            kind,
            state,
            held,
            doublings,
            proofs,
            epoch,
            version,
            n,
            ts_us,
            wait_ms,
            base_ms,
            max_ms,
            ramp_ms,
            expires_us,
            tx,
        ) = HEAD.unpack_from(data)
        body = _body_decoder.decode(memoryview(data)[HEAD.size :])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Unreadable(f"no record: {exc}") from exc
    if not 1 <= kind <= 4 or state > 2 or max(version, n, ts_us, expires_us) > MAX_EXACT:
        raise Unreadable(f"a record of kind {kind} and state {state} is none of ours")
    if kind != Kind.ROUTE and len(data) > MAX_RECORD_BYTES:
        raise Unreadable(f"{len(data)} bytes are too many for a record")
    # Whoever reads goes by the key: one that is none must not end a loop that all others' records come through.
    if not _KEY.match(body.key):
        raise Unreadable(f"{body.key[:80]!r} is no register's key")
    return Record(
        kind,
        state,
        epoch,
        version,
        tx,
        body.key,
        body.service,
        body.by,
        body.why,
        body.evidence,
        n,
        ts_us,
        held != 0,
        doublings,
        proofs,
        wait_ms,
        base_ms,
        max_ms,
        ramp_ms,
        expires_us,
        body.blob,
        body.trace,
    )


def register_key(scope: Scope, service: str, name: str) -> str:
    """The key of a breaker's register: `node:chat/10.0.0.7:8000`. The same endpoint in two services is two nodes.

    A client may call its session what no UTF-8 can say (half of a surrogate pair); that is escaped here.
    """
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"{scope.value}:{service}/{name}"


def route_key(service: str) -> str:
    """The key of a service's routing table."""
    return f"route:{service}/"


def budget_key(quota: str, tenant: str) -> str:
    """The key of a tenant's budget: `budget:QUOTA/TENANT`. A tenant is what its client says it is: any text, cut to
    MAX_TENANT_BYTES by a hash of the whole."""
    name = tenant.encode("utf-8", "backslashreplace")
    if len(name) > MAX_TENANT_BYTES:
        name = b"blake2b:" + blake2b(name, digest_size=16).hexdigest().encode()
    return f"{BUDGET}:{quota}/{name.decode()}"


def parse_key(key: str) -> tuple[str, str, str]:
    """A register's key in parts: scope (or `route`), service, name. ValueError if it is none."""
    scope, colon, rest = key.partition(":")
    service, slash, name = rest.partition("/")
    if not colon or not slash or not service:
        raise ValueError(f"{key!r} is not SCOPE:SERVICE/NAME")
    return scope, service, name


def shard_of(key: str) -> int:
    """Where a key lives, 0-15.

    A service's nodes, routes and kinds of request lie in one shard, so that one function call can count how many nodes
    are closed; sessions are many and need no counting, and are spread over all.
    """
    scope, service, _ = parse_key(key)
    spread = key if scope == Scope.SESSION else service
    return crc_hqx(spread.encode(), 0) % SHARDS


def budget_shard(key: str) -> int:
    """Where a tenant's budget lives, 0-15: they are spread over all. ValueError if the key is none of a budget."""
    if parse_key(key)[0] != BUDGET:
        raise ValueError(f"{key!r} is no budget's key")
    return crc_hqx(key.encode(), 0) % SHARDS
