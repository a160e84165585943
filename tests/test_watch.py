import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from msgspec.structs import replace

from sidecar.policy.errors import PolicyErrors
from sidecar.policy.schema import Snapshot
from sidecar.policy.store import PolicyStore
from sidecar.watch import READ_ANYWAY, SETTLE_ROUNDS, PolicyFiles, PolicyWatcher, read_policy


def services(*names: str) -> str:
    listed = ", ".join(f"{{name: {name}, models: [{name}]}}" for name in names)
    return f"apiVersion: sidecar/v1\nkind: Policy\nservices: [{listed}]\n"


class Followed:
    """A watcher over `path`, and what it told."""

    def __init__(self, path: Path, *, upstreams: tuple[str, ...] = (), interval_s: float = 3600.0) -> None:
        self.store = PolicyStore(read_policy(path, upstreams=upstreams))
        self.changes: list[Snapshot] = []
        self.refusals: list[str] = []
        self.told = asyncio.Event()
        self.watcher = PolicyWatcher(
            path, self.store, self._change, self._refuse, upstreams=upstreams, interval_s=interval_s, settle_s=0.0
        )

    def _change(self, snapshot: Snapshot) -> None:
        self.store.swap(snapshot)
        self.changes.append(snapshot)
        self.told.set()

    def _refuse(self, error: str) -> None:
        self.store.refuse(error)
        self.refusals.append(error)
        self.told.set()

    async def check(self, times: int = 1) -> tuple[list[str] | None, str | None]:
        """Poll; the names of the services if a change was told, the words if a refusal was."""
        before = len(self.changes), len(self.refusals)
        for _ in range(times):
            with blockbuster_ctx():
                await self.watcher.check()
        changes, refusals = self.changes[before[0] :], self.refusals[before[1] :]
        assert len(changes) + len(refusals) <= 1
        return ([s.name for s in changes[0].services] if changes else None, refusals[0] if refusals else None)

    async def until_named(self, names: list[str]) -> None:
        await _until(lambda: self.names == names)

    @property
    def names(self) -> list[str]:
        return [service.name for service in self.store.current.services]


QUIET = (None, None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(services("a"))
    return path


async def test_a_change_is_told_once_with_the_next_version(file: Path) -> None:
    followed = Followed(file)
    assert await followed.check() == QUIET
    file.write_text(services("a", "b"))
    assert await followed.check() == (["a", "b"], None)
    assert followed.store.current.version == 2
    assert await followed.check(3 * READ_ANYWAY) == QUIET
    file.write_text(services("b"))
    assert await followed.check() == (["b"], None)
    assert followed.store.current.version == 3


async def test_what_reads_the_same_is_no_change(file: Path) -> None:
    followed = Followed(file)
    assert await followed.check() == QUIET
    os.utime(file, ns=(1, 1))
    assert await followed.check() == QUIET
    file.write_text("# a comment\n" + services("a"))
    assert await followed.check() == QUIET
    replaced = file.with_suffix(".new")
    replaced.write_text(services("a"))
    replaced.rename(file)
    assert await followed.check() == QUIET
    assert followed.store.current.version == 1


async def test_a_bad_file_is_told_once_and_the_last_good_one_stays(file: Path) -> None:
    followed = Followed(file)
    await followed.check()
    file.write_text(services("a", "a"))
    change, refusal = await followed.check()
    assert change is None
    assert refusal is not None
    assert f"{file}:3: $.services[1].name: service a is defined already" in refusal
    assert followed.names == ["a"]
    assert await followed.check(3 * READ_ANYWAY) == QUIET
    file.write_text(services("a", "a") + "nope: 1\n")
    _, refusal = await followed.check()
    assert "nope" in str(refusal)
    assert (followed.store.failed, followed.store.current.version) == (2, 1)


async def test_the_same_policy_after_a_bad_one_is_told_so_that_the_error_goes(file: Path) -> None:
    followed = Followed(file)
    await followed.check()
    file.write_text("[")
    await followed.check()
    assert followed.store.last_error
    file.write_text(services("a"))
    assert await followed.check() == (["a"], None)
    assert not followed.store.last_error


async def test_a_half_written_file_is_a_bad_one_until_the_rest_comes(file: Path) -> None:
    followed = Followed(file)
    await followed.check()
    whole = services("a", "b")
    with file.open("w") as writer:
        _, refusal = await followed.check()
        assert "no document" in str(refusal)
        writer.write(whole[:-5])
        writer.flush()
        _, refusal = await followed.check()
        assert "not YAML" in str(refusal)
        assert followed.names == ["a"]
        writer.write(whole[-5:])
        writer.flush()
        assert await followed.check() == (["a", "b"], None)


class Writer:
    """Stands in for the pause between two looks: each time, the file is written on."""

    def __init__(self, file: Path, contents: Iterable[str]) -> None:
        self._file = file
        self._contents = iter(contents)
        self.pauses = 0

    async def sleep(self, seconds: float) -> None:
        self.pauses += 1
        content = next(self._contents, None)
        if content is not None:
            await asyncio.to_thread(self._file.write_text, content)


async def test_the_front_half_of_a_policy_is_never_taken_for_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [services("a"), services("a") + "---\n" + services("b"), services("a") + "---\n" + services("b", "c")]
    file.write_text(halves[-1])
    followed = Followed(file)
    await followed.check()
    writer = Writer(file, [*halves, services("d")])
    monkeypatch.setattr(asyncio, "sleep", writer.sleep)
    file.write_text("")
    assert await followed.check() == QUIET  # back to what is in force, and so no change
    assert writer.pauses == 3
    file.write_text("")
    assert await followed.check() == (["d"], None)
    assert await followed.check() == QUIET


async def test_a_file_that_never_settles_is_taken_as_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(file)
    await followed.check()
    writer = Writer(file, (services(f"s{n}") for n in count()))
    monkeypatch.setattr(asyncio, "sleep", writer.sleep)
    file.write_text("")
    assert await followed.check() == ([f"s{SETTLE_ROUNDS - 1}"], None)
    assert writer.pauses == SETTLE_ROUNDS


async def test_a_change_within_one_tick_of_the_clock_is_found_all_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(file)
    await followed.check()
    monkeypatch.setattr(PolicyFiles, "_look", lambda self: followed.watcher._files._attributes)
    file.write_text(services("b"))
    assert await followed.check() == QUIET
    assert await followed.check(READ_ANYWAY) == (["b"], None)


async def test_a_configmap_swap_is_one_change(tmp_path: Path) -> None:
    def publish(generation: str, content: str) -> None:
        """As the kubelet does: a new directory, then one rename of the link to it."""
        (tmp_path / generation).mkdir()
        (tmp_path / generation / "policy.yaml").write_text(content)
        (tmp_path / "..data_tmp").symlink_to(generation)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("..2026_01", services("a"))
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    for path in (tmp_path, tmp_path / "policy.yaml"):
        followed = Followed(path)
        assert await followed.check() == QUIET
        generation = f"..{path.name}"
        publish(generation, services("a", path.name.replace(".", "-")))
        change, refusal = await followed.check()
        assert change == ["a", path.name.replace(".", "-")]
        assert refusal is None
        assert await followed.check(2 * READ_ANYWAY) == QUIET


async def test_a_directory_is_its_policy_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "20.yml").write_text(services("b"))
    (tmp_path / "10.yaml").write_text(services("a"))
    (tmp_path / "30.json").write_text('{"apiVersion": "sidecar/v1", "kind": "Policy", "services": [{"name": "c"}]}')
    for ignored in (".hidden.yaml", "schema.json", "notes.txt", "40.yaml.swp", "50.yaml~"):
        (tmp_path / ignored).write_text("[")
    (tmp_path / "60.yaml").mkdir()
    followed = Followed(tmp_path)
    assert followed.names == ["a", "b", "c"]
    (tmp_path / "15.yaml").write_text(services("x"))
    assert await followed.check() == (["a", "x", "b", "c"], None)
    (tmp_path / "10.yaml").unlink()
    assert await followed.check() == (["x", "b", "c"], None)
    (tmp_path / "15.yaml").rename(tmp_path / "25.yaml")
    assert await followed.check() == (["b", "x", "c"], None)


async def test_files_that_are_gone_are_told_once_and_may_come_back(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    path.mkdir()
    (path / "a.yaml").write_text(services("a"))
    followed = Followed(path)
    await followed.check()
    (path / "a.yaml").unlink()
    _, refusal = await followed.check()
    assert "no policy in this directory" in str(refusal)
    assert await followed.check(3 * READ_ANYWAY) == QUIET
    path.rmdir()
    _, refusal = await followed.check(READ_ANYWAY)
    assert "cannot be read: No such file or directory" in str(refusal)
    assert await followed.check(3 * READ_ANYWAY) == QUIET
    assert followed.names == ["a"]
    path.mkdir()
    (path / "a.yaml").write_text(services("b"))
    assert await followed.check() == (["b"], None)


@pytest.mark.parametrize("name", ["missing.yaml", "dangling.yaml", "fifo.yaml"])
def test_what_is_no_file_is_an_error_and_never_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(PolicyErrors, match="cannot be read") as caught:
        read_policy(tmp_path / name)
    assert [error.file for error in caught.value.errors] == [str(tmp_path / name)]


def test_every_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").symlink_to("nowhere")
    (tmp_path / "c.yaml").write_text(services("c"))
    with pytest.raises(PolicyErrors) as caught:
        read_policy(tmp_path)
    assert len(caught.value.errors) == 2


async def test_upstreams_are_added_at_every_load(file: Path) -> None:
    followed = Followed(file, upstreams=("http://engine",))
    assert await followed.check() == QUIET
    file.write_text(services("b"))
    assert await followed.check() == (["b"], None)
    assert [endpoint.url for endpoint in followed.store.current.services[0].endpoints] == ["http://engine"]
    file.write_text(services("b", "c"))
    _, refusal = await followed.check()
    assert "several" in str(refusal)


async def test_an_empty_directory_beside_upstreams_is_no_fault_until_it_had_a_policy(tmp_path: Path) -> None:
    followed = Followed(tmp_path, upstreams=("http://engine",))
    assert followed.names == ["default"]
    assert await followed.check(2) == QUIET
    (tmp_path / "a.yaml").write_text("[")
    _, refusal = await followed.check()
    assert "not YAML" in str(refusal)
    (tmp_path / "a.yaml").unlink()
    assert await followed.check() == (["default"], None)  # no policy was in force: there is none to keep
    (tmp_path / "a.yaml").write_text(services("a"))
    assert await followed.check() == (["a"], None)
    (tmp_path / "a.yaml").unlink()
    _, refusal = await followed.check()
    assert "no policy in this directory" in str(refusal)
    assert (followed.names, await followed.check(2)) == (["a"], QUIET)
    (tmp_path / "a.yaml").write_text(services("b"))
    assert await followed.check() == (["b"], None)


def test_an_empty_directory_alone_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(PolicyErrors, match="no policy in this directory"):
        read_policy(tmp_path)


def test_a_policy_without_services_warns_that_it_serves_nothing(file: Path) -> None:
    file.write_text("{apiVersion: sidecar/v1, kind: Policy}")
    assert read_policy(file).warnings == ("there is no service: every request is answered 404",)
    assert read_policy(file, upstreams=["http://a"]).warnings == ()


async def test_asking_loads_even_what_did_not_change(file: Path) -> None:
    followed = Followed(file)
    await followed.check()
    followed.watcher.reload()
    assert await followed.check() == (["a"], None)
    assert await followed.check() == QUIET
    file.write_text("[")
    await followed.check()
    followed.watcher.reload()
    _, refusal = await followed.check()
    assert refusal


async def test_run_polls_until_cancelled(file: Path) -> None:
    followed = Followed(file, interval_s=0.001)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(followed.watcher.run())
        file.write_text(services("b"))
        await followed.told.wait()
        running.cancel()
    assert followed.names == ["b"]


async def test_sighup_loads_at_once(file: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    followed = Followed(file)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(followed.watcher.run())
        await _until(lambda: signal.getsignal(signal.SIGHUP) != before)
        for names in (["b"], ["b", "c"]):
            file.write_text(services(*names))
            os.kill(os.getpid(), signal.SIGHUP)
            await followed.until_named(names)
        running.cancel()
    assert signal.getsignal(signal.SIGHUP) == before


def test_off_the_main_thread_polling_serves_alone(file: Path) -> None:
    names: list[str] = []

    async def follow() -> None:
        followed = Followed(file, interval_s=0.001)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(followed.watcher.run())
            file.write_text(services("b"))
            await followed.told.wait()
            running.cancel()
        names.extend(followed.names)

    thread = threading.Thread(target=lambda: asyncio.run(follow()))
    thread.start()
    thread.join(30)
    assert names == ["b"]


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0)


async def test_what_prepares_a_snapshot_works_beside_the_loop_and_has_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(services("a"))
    threads: list[int] = []
    warnings: list[str] = []

    def prepare(snapshot: Snapshot) -> Snapshot:
        threads.append(threading.get_ident())
        return replace(snapshot, warnings=tuple(warnings))

    store, changes = PolicyStore(read_policy(path)), list[Snapshot]()
    watcher = PolicyWatcher(path, store, changes.append, pytest.fail, prepare=prepare, settle_s=0.0)
    for said in ([], ["bad"], ["bad"], []):
        warnings[:] = said
        watcher.reload()
        await watcher.check()
        store.swap(changes[-1])
        assert changes[-1].warnings == tuple(said)
    assert len(changes) == 4
    assert threading.get_ident() not in threads
