"""What the log says of each key: the latest record, whatever order the records came in.

State is a function of the *set* of records: the latest by `Record.order` is kept, so what comes twice or out of order
changes nothing, and a shard may be read whole while it changes. Records are kept as the bytes they came as: a hundred
thousand sessions would be three times as much as structs, and few are ever looked at.
"""

import struct
from typing import Final

from sidecar.txlog.codec import HEAD, SHARDS, Code, Kind, Record, decode, shard_of
from sidecar.txlog.store import CLOSED_TTL_MS, OPEN_TTL_MS

_ORDER: Final = struct.Struct(">2xB4xIQ")
"""State, epoch and version, where `codec.HEAD` has them."""
_TX_AT: Final = HEAD.size - 16
_TIMES: Final = struct.Struct(">27xQ8xI")
"""ts_us and max_ms."""


class Fold:
    """The registers, by shard and key."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: tuple[dict[str, bytes], ...] = tuple({} for _ in range(SHARDS))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def take(self, record: Record, data: bytes) -> bool:
        """Takes a record in, with the bytes that it was decoded from; True if it is the latest of its key."""
        registers = self._shards[shard_of(record.key)]
        known = registers.get(record.key)
        if known is not None and record.order <= order_of(known):
            return False
        registers[record.key] = data
        return True

    def raw(self, key: str) -> bytes:
        """The bytes of a key's register; empty where there is none."""
        return self._shards[shard_of(key)].get(key, b"")

    def get(self, key: str) -> Record | None:
        """The latest record of a key."""
        data = self.raw(key)
        return decode(data) if data else None

    def version(self, key: str) -> tuple[int, int]:
        """(epoch, version) of a key's register; (0, 0) where there is none."""
        data = self.raw(key)
        return order_of(data)[:2] if data else (0, 0)

    def state(self, key: str) -> int:
        """The `Code` of a key's register; CLOSED where there is none."""
        data = self.raw(key)
        return data[2] if data else Code.CLOSED

    def shard(self, shard: int) -> list[tuple[str, bytes]]:
        """A shard's registers, as they are now."""
        return list(self._shards[shard].items())

    def forget(self, shard: int, now_us: int) -> int:
        """Drops what nobody needs any more, by the same rule as the server; how many that was."""
        registers = self._shards[shard]
        gone = [key for key, data in registers.items() if _outlived(data, now_us)]
        for key in gone:
            del registers[key]
        return len(gone)


def order_of(data: bytes) -> tuple[int, int, int, bytes]:
    """`Record.order` of a record's bytes, without decoding them."""
    state, epoch, version = _ORDER.unpack_from(data)
    return epoch, version, state, data[_TX_AT : _TX_AT + 16]


def _outlived(data: bytes, now_us: int) -> bool:
    if data[3] or data[1] == Kind.ROUTE:
        return False  # an order holds it; a table stands until the next one
    ts_us, max_ms = _TIMES.unpack_from(data)
    ttl_ms = CLOSED_TTL_MS if data[2] == Code.CLOSED else OPEN_TTL_MS + 2 * max_ms
    # Later than the server: whoever forgets first would take an old record for a new one.
    return bool(now_us - ts_us > 2000 * ttl_ms)
