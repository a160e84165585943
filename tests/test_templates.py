"""Chat templates on disk: read with the policy, kept through what goes wrong, never read by a request."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from sidecar.core.revise import Accepted, Update
from sidecar.core.table import Target
from sidecar.kernel.errors import SidecarError
from sidecar.main import Running, serving
from sidecar.policy.schema import Endpoint, Service, Snapshot
from sidecar.settings import Listen, Settings
from sidecar.templates import Templates
from tests.harness import Message, Upstream, answers, chunked, connect, eventually
from tests.under_test import chat, event, service, sidecar, stream_head

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def naming(*paths: Path | str, version: int = 1) -> Snapshot:
    endpoints = tuple(
        Endpoint(url=f"http://10.0.0.{index}:1", engine="triton", chat_template=str(path))
        for index, path in enumerate(paths)
    )
    return Snapshot(version=version, services=(Service(name="s", endpoints=endpoints),))


def written(folder: Path, source: str = "{{ messages[0].content }}|", **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def prompt(templates: Templates, path: Path | str) -> str | None:
    template = templates.of(str(path))
    return None if template is None else template.render(CHAT)


def nobody_hears(level: str, event: str, **fields: Any) -> None:
    pytest.fail(f"{level} {event} {fields}")


@pytest.fixture
def templates() -> Templates:
    return Templates(lambda: 0.0, nobody_hears)


def test_folder_and_file_are_read_and_what_is_good_gives_no_warning(templates: Templates, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "{{ bos_token }}hi", tokenizer_config='{"bos_token": "<s>"}')
    other = tmp_path / "model" / "other.jinja"
    other.write_text("{{ bos_token }}other")
    alone = tmp_path / "alone.jinja"
    alone.write_text("[{{ bos_token }}]")
    snapshot = naming(folder, other, alone, "")
    assert templates.read(snapshot) is snapshot
    assert [prompt(templates, path) for path in (folder, other, alone)] == ["<s>hi", "<s>other", "[]"]
    assert templates.of("") is None
    assert templates.why_not("") == "its endpoint has no chat_template"


BAD = [
    pytest.param(lambda path: None, "cannot be read: No such file or directory", id="missing"),
    pytest.param(lambda path: path.mkdir(), "there is no chat template", id="empty folder"),
    pytest.param(lambda path: path.write_text("\n{{"), "chat_template.jinja: line 2: ", id="no template"),
    pytest.param(lambda path: written(path, tokenizer_config="{"), "tokenizer_config.json: ", id="no configuration"),
    pytest.param(os.mkfifo, "cannot be read: not a file", id="pipe"),
]


@pytest.mark.parametrize(("make", "why"), BAD)
def test_bad_one_is_a_warning_and_a_reason(templates: Templates, tmp_path: Path, make: Any, why: str) -> None:
    path, good = tmp_path / "model", written(tmp_path / "good")
    make(path)
    told = templates.read(naming(path, good)).warnings
    assert len(told) == 1
    assert told[0].startswith(f"chat_template {path}: ")
    assert why in told[0]
    assert templates.of(str(path)) is None
    assert templates.why_not(str(path)) == "its chat_template cannot be used; the sidecar's log says why"
    assert prompt(templates, good) == "hi|"


def test_warnings_of_the_policy_stay(templates: Templates, tmp_path: Path) -> None:
    snapshot = Snapshot(version=1, services=naming(tmp_path / "none").services, warnings=("there",))
    assert templates.read(snapshot).warnings[0] == "there"
    assert len(templates.read(snapshot).warnings) == 2


def test_change_is_seen_with_the_next_load_and_what_did_not_change_is_not_read(
    templates: Templates, tmp_path: Path
) -> None:
    changing, same = written(tmp_path / "a", "1"), written(tmp_path / "b", "2")
    templates.read(naming(changing, same))
    before = templates.of(str(same))
    written(changing, "changed")
    assert prompt(templates, changing) == "1"
    templates.read(naming(changing, same, version=2))
    assert prompt(templates, changing) == "changed"
    assert templates.of(str(same)) is before


def test_changed_tokenizer_beside_it_is_a_change(templates: Templates, tmp_path: Path) -> None:
    folder = written(tmp_path / "a", "[{{ bos_token }}]")
    templates.read(naming(folder))
    written(folder, "[{{ bos_token }}]", special_tokens_map='{"bos_token": "<s>"}')
    templates.read(naming(folder))
    assert prompt(templates, folder) == "[<s>]"


def test_good_one_that_went_bad_stays_with_a_warning_until_it_is_good_again(
    templates: Templates, tmp_path: Path
) -> None:
    folder = written(tmp_path / "a", "1")
    templates.read(naming(folder))
    written(folder, "{{")
    for _ in range(2):
        (warning,) = templates.read(naming(folder)).warnings
        assert "chat_template.jinja: line 1: " in warning
        assert warning.endswith("; the one that was read before stays")
        assert prompt(templates, folder) == "1"
    written(folder, "2")
    assert not templates.read(naming(folder)).warnings
    assert prompt(templates, folder) == "2"


def test_templates_of_the_policy_before_stay_until_the_next_one_is_applied(
    templates: Templates, tmp_path: Path
) -> None:
    old, new = (written(tmp_path / name, name) for name in ("old", "new"))
    templates.read(naming(old))
    templates.keep_only(naming(old).services[0].endpoints)
    templates.read(naming(new))  # not applied yet: requests still go by the policy before
    assert [prompt(templates, path) for path in (old, new)] == ["old", "new"]
    templates.keep_only(naming(new).services[0].endpoints)
    assert [prompt(templates, path) for path in (old, new)] == [None, "new"]
    assert "has not been read" in templates.why_not(str(old))


async def test_request_never_waits_for_the_disk(templates: Templates, tmp_path: Path) -> None:
    folder, bad = written(tmp_path / "a"), tmp_path / "none"
    templates.read(naming(folder, bad))
    with blockbuster_ctx():
        assert prompt(templates, folder) == "hi|"
        assert templates.of(str(bad)) is None
        assert "cannot be used" in templates.why_not(str(bad))
        with pytest.raises(SidecarError):
            template = templates.of(str(folder))
            assert template is not None
            template.render([{}])


def test_jinja_is_not_loaded_where_no_policy_names_a_template() -> None:
    script = (
        "import sys, sidecar.main; from sidecar.policy.schema import Snapshot; "
        "from sidecar.templates import Templates; "
        "Templates(lambda: 0.0, print).read(Snapshot(version=1, services=())); print('jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "False"


# --- routing tables ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(templates: Templates) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(templates.run())
        with blockbuster_ctx("sidecar"):
            yield
        task.cancel()


async def test_what_a_table_names_is_read_beside_the_loop_and_told_if_it_is_bad(tmp_path: Path) -> None:
    said: list[tuple[str, str, str, str]] = []
    templates = Templates(
        lambda: 0.0, lambda level, event, **fields: said.append((level, event, fields["path"], fields["why"]))
    )
    good, bad = written(tmp_path / "good"), tmp_path / "bad"
    async with running(templates):
        templates.add(naming(good, bad).services[0].endpoints)
        assert templates.of(str(good)) is None
        assert "has not been read" in templates.why_not(str(good))
        assert [templates.awaits(path) for path in (str(good), str(bad), "", "/other")] == [True, True, False, False]
        await eventually(lambda: bool(said), "the bad one")
        assert prompt(templates, good) == "hi|"
        templates.add(naming(good, bad).services[0].endpoints)  # nothing new: a change of weights
        await asyncio.sleep(0)
    assert said == [
        ("warning", "chat_template_unusable", str(bad), "cannot be read: No such file or directory"),
    ]
    assert "cannot be used" in templates.why_not(str(bad))
    assert [templates.awaits(path) for path in (str(good), str(bad))] == [False, False]


async def test_what_tables_name_stays_while_it_is_in_force_and_is_read_anew_with_each_load(
    templates: Templates, tmp_path: Path
) -> None:
    named, routed = written(tmp_path / "named", "1"), written(tmp_path / "routed", "2")
    async with running(templates):
        templates.add(naming(routed).services[0].endpoints)
        await eventually(lambda: templates.of(str(routed)) is not None, "the table's template")
    written(routed, "changed")
    for _ in range(3):
        templates.read(naming(named))
        templates.keep_only(naming(named, routed).services[0].endpoints)
    assert [prompt(templates, path) for path in (named, routed)] == ["1", "changed"]
    templates.keep_only(naming(named).services[0].endpoints)
    assert [prompt(templates, path) for path in (named, routed)] == ["1", None]


async def test_table_that_comes_back_to_what_was_forgotten_has_it_read_again(
    templates: Templates, tmp_path: Path
) -> None:
    path = written(tmp_path / "a", "1")
    endpoints = naming(path).services[0].endpoints
    async with running(templates):
        for _ in range(2):
            templates.keep_only(endpoints)
            await eventually(lambda: templates.of(str(path)) is not None, "the template")
            templates.keep_only(())
            assert templates.of(str(path)) is None


# --- with a sidecar ---------------------------------------------------------------------------------------------------

TRITON = answers(stream_head() + chunked(event(b'{"text_output":"hello"}'), end=True))


def policy_of(upstream: Upstream, template: Path, name: str = "s") -> str:
    endpoint = f"{{url: '{upstream.url}', engine: triton, chat_template: {template}}}"
    return f"apiVersion: sidecar/v1\nkind: Policy\nservices: [{{name: {name}, endpoints: [{endpoint}]}}]\n"


async def asked(running: Running) -> Message:
    async with connect(running.proxy_port) as client:
        return await client.ask(chat(text="hi"), b"POST")


async def loaded(running: Running) -> None:
    """The policy anew, as SIGHUP asks for it."""
    version = running.store.current.version
    assert running.watcher is not None
    running.watcher.reload()
    await eventually(lambda: running.store.current.version > version, "the policy")


async def test_chats_go_through_the_template_that_the_policy_names_as_it_was_last_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    policy = tmp_path / "policy.yaml"
    async with Upstream(TRITON) as upstream:
        policy.write_text(policy_of(upstream, folder))
        settings = Settings(listen=Listen("127.0.0.1", 0), admin=None, control=None, policy=policy, access_log="off")
        async with serving(settings) as running:
            assert any("No such file" in warning for warning in running.store.current.warnings)
            refused = await asked(running)
            assert refused.status == 400
            assert b'"unsupported"' in refused.body
            assert str(folder).encode() not in refused.body  # clients are told of no files
            assert not upstream.requests

            written(folder, "<{{ messages[0].content }}>")
            await loaded(running)
            assert not running.store.current.warnings
            assert (await asked(running)).status == 200
            assert json.loads(upstream.requests[-1].body)["text_input"] == "<hi>"

            written(folder, "[{{ messages[0].content }}]")
            policy.write_text(policy_of(upstream, folder, name="t"))
            await loaded(running)
            assert (await asked(running)).status == 200
            assert json.loads(upstream.requests[-1].body)["text_input"] == "[hi]"


async def test_chats_go_to_the_version_that_a_table_names_with_its_template(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "<{{ messages[0].content }}>")
    async with Upstream(TRITON) as upstream, sidecar(service(name="s")) as proxy:
        running = proxy.running
        update = Update(
            service="s",
            version="v2",
            engine="triton",
            endpoints=(Target(upstream.url),),
            weight=1.0,
            chat_template=str(folder),
        )
        assert isinstance(await running.routes.submit(update), Accepted)
        await eventually(lambda: running.templates.of(str(folder)) is not None, "the template")
        assert (await asked(running)).status == 200
    assert json.loads(upstream.requests[-1].body)["text_input"] == "<hi>"
