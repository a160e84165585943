"""The log's server: Redis or Valkey, alone, behind sentinels or as a cluster. The port's calls as functions there.

1. One list of calls is one piece of bytes to a server and one back; in a cluster one to each server concerned, all
   sent before the first answer is read. Readers have connections of their own: a lane of all shards, or, in a cluster,
   one of each, since a shard is a slot and slots move.
2. Every exchange ends within `timeout_s`, connecting and signing in included; a blocking read within `block_ms` more.
   What we stood still ourselves is not the server's (`proxy.patience`).
   Nothing is repeated whose outcome is not known. What was surely not done is done where it belongs: a slot that moved
   (MOVED, ASK), functions that were flushed (loaded again, once).
3. Whatever fails closes the connections that lay idle: what comes next asks the sentinels, the name server or the
   cluster where the server is now.
4. `image` reads position and `n` first and the registers after, in pieces. That is no moment's picture, and need not
   be: a register may be later than the position, and whoever reads merges by maximum.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import hiredis
from redis.exceptions import AskError, MovedError, NoPermissionError, NoScriptError, RedisError, ResponseError

from sidecar.proxy.patience import Patience
from sidecar.txlog.codec import SHARDS
from sidecar.txlog.connect import Link, down, link_to
from sidecar.txlog.functions import NAMES, Command, Packer, library, slot_of
from sidecar.txlog.store import Call, Entry, Image, Reply, StoreDown, StoreUnfit, Verdict
from sidecar.txlog.target import Address, Target, parse_target

TIMEOUT_S: Final = 0.5
LATE_S: Final = 0.1
"""How late a blocking read may come back empty: the server looks ten times a second whose wait is over."""
SCAN: Final = b"1000"
"""Registers in a piece: some 200 KB, a millisecond of the server's."""
HOPS: Final = 3
"""Redirections followed within one exchange: MOVED, then ASK, then the answer."""
IDLE: Final = 4
"""Connections kept for calls to one server; more are closed after use."""

_CALLS: Final = -1
_NOWHERE: Final = "0-0"
_VERDICTS: Final = {verdict.value.encode(): verdict for verdict in Verdict}
_ERRORS: Final = (RedisError, OSError, hiredis.HiredisError)

_Work = TypeVar("_Work")


class RedisStore:
    """`Store` on a server. `url` as `target` reads it (ValueError); `prefix` begins every key's hash tag.

    `scripts_only`: do not use functions where the server has them.
    """

    __slots__ = (
        "_clustered",
        "_idle",
        "_is_closed",
        "_is_lost",
        "_packer",
        "_prefix",
        "_routes",
        "_scripts_only",
        "_sentinels",
        "_streams",
        "_target",
        "_timeout_s",
    )

    def __init__(
        self, url: str, prefix: str = "dtl", timeout_s: float = TIMEOUT_S, *, scripts_only: bool = False
    ) -> None:
        self._target: Target = parse_target(url)
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._scripts_only = scripts_only
        self._packer = Packer(prefix, functions=not scripts_only)
        self._clustered = False
        self._is_closed = False
        self._is_lost = False
        self._sentinels = list(self._target.addresses) if self._target.master else []
        self._routes: list[Address] = [self._target.addresses[0]] * SHARDS
        self._idle: dict[tuple[Address, int], list[Link]] = {}
        self._streams: dict[bytes, tuple[int, bool]] = {}
        for shard, names in enumerate(self._packer.shards):
            self._streams[names.log] = shard, False
            self._streams[names.evidence] = shard, True

    def __repr__(self) -> str:
        return f"RedisStore({self._target})"

    async def open(self) -> None:
        """See `Store`. May be called again after it failed."""
        self._is_closed = False
        await self._within(self._timeout_s, self._anywhere(self._greet))
        for address in dict.fromkeys(self._routes):
            await self._within(self._timeout_s, self._load(address))

    async def close(self) -> None:
        """See `Store`."""
        self._is_closed = True
        await self._drop_idle()

    async def call(self, calls: list[Call]) -> list[Reply]:
        """See `Store`."""
        packed = [self._packer.pack(call) for call in calls]
        shards, commands = [shard for shard, _ in packed], [command for _, command in packed]
        return [_reply(raw) for raw in await self._within(self._timeout_s, self._run(shards, commands))]

    async def image(self, shard: int) -> Image:
        """See `Store`. Each piece has the time of a call."""
        names = self._packer.shards[shard]
        first: list[Command] = [
            (b"XINFO", b"STREAM", names.log),
            (b"XINFO", b"STREAM", names.evidence),
            (b"GET", names.n),
            (b"HSCAN", names.registers, b"0", b"COUNT", SCAN),
        ]
        log, evidence, n, piece = await self._within(self._timeout_s, self._exchange([shard] * 4, first))
        registers: dict[bytes, bytes] = {}
        while True:
            cursor, found = self._sound(piece)
            registers.update(zip(found[::2], found[1::2], strict=True))
            if cursor == b"0":
                break
            more: Command = (b"HSCAN", names.registers, cursor, b"COUNT", SCAN)
            [piece] = await self._within(self._timeout_s, self._exchange([shard], [more]))
        return Image(shard, self._count(n), self._position(log), self._position(evidence), list(registers.values()))

    async def counts(self) -> list[int]:
        """See `Store`."""
        commands: list[Command] = [(b"GET", names.n) for names in self._packer.shards]
        found = await self._within(self._timeout_s, self._exchange(range(SHARDS), commands))
        return [self._count(n) for n in found]

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """See `Store`. Known once it is open."""
        return tuple((shard,) for shard in range(SHARDS)) if self._clustered else (tuple(range(SHARDS)),)

    async def read(self, lane: int, after: dict[int, tuple[str, str]], block_ms: int, count: int) -> list[Entry]:
        """See `Store`. One reader to a lane."""
        if not after:
            return []
        names = self._packer.shards
        streams = [name for shard in after for name in (names[shard].log, names[shard].evidence)]
        positions = [position.encode() for both in after.values() for position in both]
        block = (b"BLOCK", b"%d" % block_ms) if block_ms else ()
        command: Command = (b"XREAD", b"COUNT", b"%d" % count, *block, b"STREAMS", *streams, *positions)
        shard = next(iter(after))
        limit_s = self._timeout_s + (block_ms / 1000 + LATE_S if block_ms else 0)
        [reply] = await self._within(limit_s, self._exchange([shard], [command], lane))
        entries: list[Entry] = []
        for stream, found in self._sound(reply) or ():
            shard, is_evidence = self._streams[stream]
            entries += _entries(shard, is_evidence, found)
        return entries

    async def history(self, shard: int, *, evidence: bool, after: str, count: int) -> list[Entry]:
        """See `Store`."""
        names = self._packer.shards[shard]
        stream = names.evidence if evidence else names.log
        command: Command = (b"XRANGE", stream, b"(" + after.encode(), b"+", b"COUNT", b"%d" % count)
        [found] = await self._within(self._timeout_s, self._exchange([shard], [command]))
        return _entries(shard, evidence, self._sound(found))

    async def newest(self, shard: int, *, before: str, count: int) -> list[Entry]:
        """See `Store`."""
        end = b"(" + before.encode() if before else b"+"
        command: Command = (b"XREVRANGE", self._packer.shards[shard].log, end, b"-", b"COUNT", b"%d" % count)
        [found] = await self._within(self._timeout_s, self._exchange([shard], [command]))
        return _entries(shard, False, self._sound(found))

    # --- opening ------------------------------------------------------------------------------------------------------

    async def _greet(self, link: Link) -> None:
        """Find out what this is, and where the shards are."""
        [text] = await link.ask((b"INFO",))
        facts = _facts(self._sound(text))
        self._check(facts)
        self._clustered = facts.get("cluster_enabled") == "1"
        if self._clustered:
            await self._map(link)

    def _check(self, facts: dict[str, str]) -> None:
        """Whether it is a server that will do, and whether it has functions."""
        if facts.get("redis_mode") == "sentinel":
            raise StoreUnfit("protocol", f"{self._target} is a sentinel: the URL is redis+sentinel://HOST/MASTER")
        is_valkey = "valkey_version" in facts
        version = facts.get("valkey_version" if is_valkey else "redis_version", "")
        try:
            major, minor = (int(part) for part in version.split(".")[:2])
        except ValueError:
            raise StoreUnfit("version", f"{self._target} does not say its version: Redis or Valkey is needed") from None
        if (major, minor) < ((7, 2) if is_valkey else (6, 2)):
            name = "Valkey" if is_valkey else "Redis"
            raise StoreUnfit("version", f"{self._target} is {name} {version}: Redis 6.2 or Valkey 7.2 is the oldest")
        self._packer = Packer(self._prefix, functions=major >= 7 and not self._scripts_only)

    async def _load(self, address: Address) -> None:
        """Load the functions, or the scripts where functions are not permitted."""
        link = await self._take(address, _CALLS)
        try:
            if self._packer.has_functions:
                [loaded] = await link.ask((b"FUNCTION", b"LOAD", library().code.encode()))
                if not isinstance(loaded, ResponseError) or "already exists" in str(loaded):
                    return
                if not isinstance(loaded, NoPermissionError) and "unknown command" not in str(loaded):
                    raise loaded
                self._packer = Packer(self._prefix, functions=False)
            scripts = library().scripts
            for loaded in await link.ask(*((b"SCRIPT", b"LOAD", scripts[name].encode()) for name in NAMES)):
                self._sound(loaded)
        finally:
            await link.drop()

    # --- exchanging ---------------------------------------------------------------------------------------------------

    async def _within(self, seconds: float, work: Coroutine[Any, Any, _Work]) -> _Work:
        """Do something with the server; whatever goes wrong is `StoreDown`."""
        try:
            async with Patience(seconds):
                return await work
        except TimeoutError as exc:
            await self._doubt()
            raise StoreDown("timeout", f"{self._target} did not answer within {seconds:g} s") from exc
        except StoreDown:
            await self._doubt()
            raise
        except _ERRORS as exc:
            await self._doubt()
            found = down(exc, self._target)
            if self._target.gives_away(str(exc)):
                # A server that does not know AUTH repeats what it was sent.
                raise type(found)(found.word, f"{self._target} refuses to sign us in") from None
            raise found from exc

    async def _doubt(self) -> None:
        """After an error: connect anew, and to where the server is then."""
        self._is_lost = self._clustered
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, {}
        for links in idle.values():
            for link in links:
                await link.drop()

    async def _run(self, shards: Sequence[int], commands: Sequence[Command]) -> list[Any]:
        """Call functions; those that were missing again, once they are loaded."""
        replies = await self._exchange(shards, commands)
        missing = [place for place, reply in enumerate(replies) if _is_missing(reply)]
        if missing:
            for address in {self._routes[shards[place]] for place in missing}:
                await self._load(address)
            again = await self._exchange([shards[place] for place in missing], [commands[place] for place in missing])
            for place, reply in zip(missing, again, strict=True):
                replies[place] = reply
        return [self._sound(reply) for reply in replies]

    async def _exchange(self, shards: Sequence[int], commands: Sequence[Command], lane: int = _CALLS) -> list[Any]:
        """Send each command to its shard's server. The replies in the commands' order, refusals as exceptions."""
        if self._is_lost:
            await self._anywhere(self._map)
            self._is_lost = False
        replies: list[Any] = [None] * len(commands)
        plan: dict[Address, list[int]] = {}
        for place, shard in enumerate(shards):
            plan.setdefault(self._routes[shard], []).append(place)
        for _ in range(HOPS):
            asking, plan = await self._round(plan, shards, commands, replies, lane), {}
            for place, address in asking.items():
                plan.setdefault(address, []).append(place)
            if not plan:
                break
        return replies

    async def _round(
        self,
        plan: dict[Address, list[int]],
        shards: Sequence[int],
        commands: Sequence[Command],
        replies: list[Any],
        lane: int,
    ) -> dict[int, Address]:
        """One exchange with each server of a plan. What is to be repeated, and where."""
        used: list[Link] = []
        try:
            for address, places in plan.items():
                link = await self._take(address, lane)
                used.append(link)
                asked = [commands[place] for place in places]
                if isinstance(replies[places[0]], AskError):
                    asked = [each for command in asked for each in ((b"ASKING",), command)]
                await link.send(asked)
            elsewhere: dict[int, Address] = {}
            for link, (address, places) in zip(used, plan.items(), strict=True):
                is_asking = isinstance(replies[places[0]], AskError)
                got = await link.receive(len(places) * (2 if is_asking else 1))
                for place, reply in zip(places, got[1::2] if is_asking else got, strict=True):
                    replies[place] = reply
                    if isinstance(reply, AskError):
                        to = Address(reply.host or address.host, reply.port)
                        elsewhere[place] = to
                        if isinstance(reply, MovedError):
                            self._routes[shards[place]] = to
        except BaseException:
            for link in used:
                await link.drop()
            raise
        for link in used:
            await self._give(link, lane)
        return elsewhere

    async def _take(self, address: Address, lane: int) -> Link:
        """A connected link to a server; behind sentinels, to the master of now."""
        idle = self._idle.get((address, lane), [])
        while idle:
            link = idle.pop()
            if await link.is_usable():
                return link
            await link.drop()
        where = await self._master() if self._target.master else address
        link = link_to(where, self._target, known_as=address)
        try:
            await link.connect()
        except BaseException:
            await link.drop()
            raise
        return link

    async def _give(self, link: Link, lane: int) -> None:
        idle = self._idle.setdefault((link.address, lane), [])
        if self._is_closed or len(idle) >= IDLE:
            await link.drop()
        else:
            idle.append(link)

    # --- finding ------------------------------------------------------------------------------------------------------

    async def _master(self) -> Address:
        """Where the master is, as the first sentinel says that answers; that one is asked first the next time."""
        name = self._target.master.encode()
        trouble: StoreDown | None = None
        for sentinel in list(self._sentinels):
            link = link_to(sentinel, self._target, sentinel=True)
            try:
                async with Patience(self._timeout_s / (len(self._sentinels) + 1)):
                    await link.connect()
                    [found] = await link.ask((b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name))
                    found = self._sound(found)
            except TimeoutError:
                trouble = StoreDown("timeout", f"the sentinel {sentinel} did not answer")
            except _ERRORS as exc:
                trouble = down(exc, f"the sentinel {sentinel}")
            else:
                if found:
                    self._sentinels.remove(sentinel)
                    self._sentinels.insert(0, sentinel)
                    return Address(found[0].decode(), int(found[1]))
                trouble = StoreUnfit("protocol", f"the sentinel {sentinel} knows no master {self._target.master!r}")
            finally:
                await link.drop()
        raise trouble or StoreDown("refused", f"{self._target} has no sentinel")

    async def _anywhere(self, do: Callable[[Link], Awaitable[None]]) -> None:
        """Do something with the first server that answers, of all that are known: a cluster's any will do."""
        known = list(dict.fromkeys((*self._target.addresses[:1], *self._routes)))
        trouble: BaseException | None = None
        for address in known:
            try:
                async with Patience(self._timeout_s / len(known)):
                    link = await self._take(address, _CALLS)
                    try:
                        return await do(link)
                    finally:
                        await link.drop()
            except StoreUnfit:
                raise
            except (TimeoutError, StoreDown, *_ERRORS) as exc:
                trouble = exc
        assert trouble is not None
        raise trouble

    async def _map(self, link: Link) -> None:
        """Ask a cluster's server which server has which slots. One that nobody has stays where it was."""
        [ranges] = await link.ask((b"CLUSTER", b"SLOTS"))
        found = self._sound(ranges)
        for shard, names in enumerate(self._packer.shards):
            slot = slot_of(names.tag)
            for first, last, (host, port, *_), *_ in found:
                if first <= slot <= last:
                    self._routes[shard] = Address((host or b"").decode() or link.address.host, port)

    # --- replies ------------------------------------------------------------------------------------------------------

    def _sound(self, reply: Any) -> Any:
        """A reply that is no refusal; else the refusal is raised."""
        if isinstance(reply, ResponseError):
            raise down(reply, self._target) from reply
        return reply

    def _position(self, reply: Any) -> str:
        """The last id that a stream ever gave."""
        if isinstance(reply, ResponseError) and "no such key" in str(reply):
            return _NOWHERE
        found = self._sound(reply)
        last: bytes = dict(zip(found[::2], found[1::2], strict=True))[b"last-generated-id"]
        return last.decode()

    def _count(self, reply: Any) -> int:
        found = self._sound(reply)
        try:
            return int(found or 0)
        except ValueError:
            raise StoreUnfit("foreign", f"{self._target} has another program's keys under this prefix") from None


def _reply(raw: Any) -> Reply:
    verdict, now, record, seq, ms, contended = raw
    return Reply(_VERDICTS[verdict], int(now), record, seq, ms, contended == 1)


def _entries(shard: int, is_evidence: bool, found: Iterable[Any]) -> list[Entry]:
    """Entries as they came; of those that are not ours, no data."""
    return [
        Entry(shard, is_evidence, id_.decode(), fields[1] if len(fields) == 2 and fields[0] == b"r" else b"")
        for id_, fields in found
    ]


def _is_missing(reply: Any) -> bool:
    return isinstance(reply, NoScriptError) or (isinstance(reply, ResponseError) and "Function not found" in str(reply))


def _facts(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, _, value in lines}
