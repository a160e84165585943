"""How each engine is told to load and unload a model, and how it tells what it has: errands, for whoever sends them.

An errand is what to send, in order, and how to read what came back. Engines mean different things by the same word, and
some lie by status, so what each answer means is decided here:

1. Triton's `load` answers when the model is ready, and keeps the old instance serving until then; afterwards that one
   is `UNLOADING` until its streams have ended. A model's own `ready` is asked, never the server's: that is 400 while
   any other model loads or once failed to. `unload` answers at once, whether there was such a model or not: the index
   tells when it is gone. A version is chosen, and an earlier one brought back, by the policy in the configuration that
   goes with the load. What was loaded again under its own number cannot be brought back: its files are gone.
2. vLLM's `load_lora_adapter` answers when the adapter is loaded, in plain text; an adapter of the same name is
   replaced only with `load_inplace` (since 0.18). The list of models says which folder an adapter came from. 404 with
   `detail` is no missing adapter: the server was started without runtime updating.
3. vLLM asleep answers its health checks as if nothing were wrong, and hangs every request. `is_sleeping` tells, and is
   there in development mode alone, as `sleep`, `wake_up` and `reset_prefix_cache` are.
4. MII has nothing to load with: a deployment is a process. Its gateway ends by a GET, which is sent only if an operator
   said so. That it is healthy says nothing of its engine; the canary does.
5. Readers are total, as all dialects'.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec

from sidecar.adapters.errand import Answer, Errand, Request
from sidecar.kernel.change import Again, Before, Done, Failed, Outcome
from sidecar.policy.schema import Endpoint, front_of
from sidecar.wire.answer import read_error

READY: Final = "READY"
HERE: Final = frozenset({READY, "LOADING", "UNLOADING"})
"""States of the index in which a version takes up memory, or may soon serve."""

MAX_WORDS: Final = 200

DEV_MODE: Final = "it answers that only when it was started with VLLM_SERVER_DEV_MODE=1"
UPDATING: Final = "it takes adapters only when it was started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class Changer(Protocol):
    """One way of changing a model at an endpoint. What cannot be asked is Failed at once."""

    def look(self) -> Errand:
        """What is there; the outcome has `before`."""

    def load(self, before: Before) -> Errand | Failed: ...

    def ready(self) -> Errand:
        """Whether what was loaded serves."""

    def drained(self, before: Before) -> Errand | Done:
        """Whether what it replaced is gone, its streams at their end."""

    def unload(self) -> Errand: ...

    def revert(self, before: Before) -> Errand | Failed:
        """Bring back what was there."""

    def restored(self, before: Before) -> Errand:
        """Whether that serves."""


class Repository:
    """A model of Triton's repository, which is in explicit mode."""

    __slots__ = ("_config", "_model", "_version")

    def __init__(self, model: str, config: str = "", version: str = "") -> None:
        self._model = model
        self._config = config
        self._version = version

    def look(self) -> Errand:
        """Its versions, and its configuration where it is loaded."""
        return Errand((_INDEX, Request(b"GET", self._path("/config"))), self._looked)

    def load(self, before: Before) -> Errand | Failed:
        """Loads it as the repository has it, with another configuration, or one version of it."""
        config = self._config
        if self._version:
            if not (config or before.config):
                return Failed(
                    f"version {self._version[:20]} goes into the model's configuration, which Triton tells of a loaded "
                    "model alone: give it with --config"
                )
            config = _with_versions(config or before.config, (self._version,))
            if not config:
                return Failed(f"version {self._version[:20]!r} is no number, or the config no JSON object")
        return Errand((self._load(config),), self._loaded, acts=True)

    def ready(self) -> Errand:
        """Its own `ready`."""
        version = f"/versions/{quote(self._version, safe='')}" if self._version else ""
        return Errand((Request(b"GET", self._path(f"{version}/ready")),), self._is_ready)

    def drained(self, before: Before) -> Errand | Done:
        """Whether versions that were loaded before, and are no longer to be, are gone."""
        return Errand((_INDEX,), _Gone(self._model, before.versions).read)

    def unload(self) -> Errand:
        """Tells it to go, again if need be, and looks whether it did."""
        return Errand((Request(b"POST", self._repository("/unload"), b"{}"), _INDEX), self._unloaded, acts=True)

    def revert(self, before: Before) -> Errand | Failed:
        """Loads the versions that were there; unloads it where there were none."""
        if not before.loaded:
            return self.unload()
        config = _with_versions(before.config, before.versions)
        if not config:
            return Failed("its configuration of before is not known")
        back = Errand((self._load(config), _INDEX), _Back(self._model, before.versions).read, acts=True)
        return Errand((_INDEX,), _Overwritten(self._model, before.versions, back).read)

    def restored(self, before: Before) -> Errand:
        """The model's `ready`, of the version that is the newest of those."""
        newest = max(before.versions, key=_number, default="")
        version = f"/versions/{quote(newest, safe='')}" if newest else ""
        return Errand((Request(b"GET", self._path(f"{version}/ready")),), self._is_ready)

    def _load(self, config: str) -> Request:
        body = _encode({"parameters": {"config": config}}) if config else b"{}"
        return Request(b"POST", self._repository("/load"), body)

    def _path(self, rest: str) -> bytes:
        return f"/v2/models/{quote(self._model, safe='')}{rest}".encode()

    def _repository(self, rest: str) -> bytes:
        return f"/v2/repository/models/{quote(self._model, safe='')}{rest}".encode()

    def _looked(self, answers: Sequence[Answer]) -> Outcome:
        states = _states(answers[0], self._model)
        if states is None:
            return _unexpected("the repository's index", answers[0])
        versions = tuple(version for version, state in states.items() if state == READY)
        config = answers[1].body if len(answers) > 1 and answers[1].status == 200 else b""
        said = f"{_named(versions)} there" if versions else "it is not loaded"
        return Done(said, Before(bool(versions), versions, config=config.decode("utf-8", "replace")))

    def _loaded(self, answers: Sequence[Answer]) -> Outcome:
        answer = answers[0]
        return Done("Triton says that it is ready") if answer.status == 200 else Failed(_words(answer))

    def _is_ready(self, answers: Sequence[Answer]) -> Outcome:
        return Done() if answers[0].status == 200 else Again(_words(answers[0]))

    def _unloaded(self, answers: Sequence[Answer]) -> Outcome:
        if answers[0].status != 200:
            return Failed(_words(answers[0]))
        return _Gone(self._model, None).read(answers[1:])


class _Gone:
    """Reads from the index whether versions of a model are gone; None: all."""

    __slots__ = ("_model", "_versions")

    def __init__(self, model: str, versions: tuple[str, ...] | None) -> None:
        self._model = model
        self._versions = versions

    def read(self, answers: Sequence[Answer]) -> Outcome:
        """Again while one of them is there that is not to stay."""
        states = _states(answers[0], self._model) if answers else None
        if states is None:
            return Again("the repository's index cannot be read")
        if self._versions is None:
            left = [version for version, state in states.items() if state in HERE]
        else:
            if all(states.get(version) == READY for version in self._versions):
                return Done("loaded again under its own version: Triton ends the instance before it after its streams")
            left = [version for version in self._versions if states.get(version) in HERE and states[version] != READY]
        if left:
            return Again(", ".join(f"version {version} is {states[version]}" for version in left))
        return Done("gone")


class _Overwritten:
    """Reads from the index whether versions that were there before can still be told from what took their place."""

    __slots__ = ("_back", "_model", "_versions")

    def __init__(self, model: str, versions: tuple[str, ...], back: Errand) -> None:
        self._model = model
        self._versions = versions
        self._back = back

    def read(self, answers: Sequence[Answer]) -> Outcome | Errand:
        """The errand that brings them back, or Failed."""
        states = _states(answers[0], self._model)
        if states is None:
            return _unexpected("the repository's index", answers[0])
        if {version for version, state in states.items() if state in (READY, "LOADING")} == set(self._versions):
            said = f"{_named(self._versions)}, loaded again under the same number"
            return Failed(f"{said}: whether the old files serve or the new ones cannot be told, nor chosen")
        return self._back


class _Back:
    """Reads whether a load brought back the versions that were there before, and not those files under their name."""

    __slots__ = ("_model", "_versions")

    def __init__(self, model: str, versions: tuple[str, ...]) -> None:
        self._model = model
        self._versions = versions

    def read(self, answers: Sequence[Answer]) -> Outcome:
        """Failed where Triton would not."""
        if answers[0].status != 200:
            return Failed(_words(answers[0]), doubted=True)
        states = _states(answers[1], self._model) if len(answers) > 1 else None
        if states is None or any(states.get(version) != READY for version in self._versions):
            return Failed("it answers 200, and the index does not have them ready", doubted=True)
        return Done(f"{_named(self._versions)} again")


class Adapter:
    """A LoRA adapter on vLLM; `path` is its folder as the engine sees it."""

    __slots__ = ("_model", "_path")

    def __init__(self, model: str, path: str = "") -> None:
        self._model = model
        self._path = path

    def look(self) -> Errand:
        """Whether one of that name is loaded, and from where; and whether the engine is in development mode."""
        return Errand((_MODELS, _IS_SLEEPING), self._looked)

    def load(self, before: Before) -> Errand | Failed:
        """Loads it, in the place of another of its name."""
        return Errand((self._load(self._path, before.loaded),), self._loaded, acts=True)

    def ready(self) -> Errand:
        """Whether it is listed, from that folder."""
        return Errand((_MODELS,), _Listed(self._model, self._path).read)

    def drained(self, before: Before) -> Errand | Done:
        """There is one of a name at a time."""
        return Done("it took the place of the old one")

    def unload(self) -> Errand:
        """Takes its name away; streams of it go on."""
        body = _encode({"lora_name": self._model})
        return Errand((Request(b"POST", b"/v1/unload_lora_adapter", body),), self._unloaded, acts=True)

    def revert(self, before: Before) -> Errand | Failed:
        """Loads the folder that was there; unloads it where there was none."""
        if not before.loaded:
            return self.unload()
        if before.path == self._path:
            return Failed(f"{self._path} was loaded again: its old files are gone")
        return Errand((self._load(before.path, True),), self._loaded, acts=True)

    def restored(self, before: Before) -> Errand:
        """Whether that folder is listed."""
        return Errand((_MODELS,), _Listed(self._model, before.path).read)

    def _load(self, path: str, over: bool) -> Request:
        said: dict[str, object] = {"lora_name": self._model, "lora_path": path}
        if over:
            said["load_inplace"] = True
        return Request(b"POST", b"/v1/load_lora_adapter", _encode(said))

    def _looked(self, answers: Sequence[Answer]) -> Outcome:
        cards = _cards(answers[0])
        if cards is None:
            return _unexpected("the list of models", answers[0])
        card = cards.get(self._model)
        # Who tells whether it sleeps can reset its cache, too: to find out by resetting it would cost the cache.
        forgets = _asleep(answers[-1]) is not None
        if card is None:
            return Done("it is not loaded", Before(forgets=forgets))
        if not card.parent:
            return Failed(f"{self._model!r} is a base model there, and no adapter")
        return Done(f"loaded from {card.root}", Before(True, path=card.root or "", forgets=forgets))

    def _loaded(self, answers: Sequence[Answer]) -> Outcome:
        answer = answers[0]
        if answer.status == 200:
            return Done(_words(answer))
        return Failed(UPDATING if _is_no_route(answer) else _words(answer))

    def _unloaded(self, answers: Sequence[Answer]) -> Outcome:
        answer = answers[0]
        if answer.status == 404 and not _is_no_route(answer):
            return Done("it was not there")
        return self._loaded(answers)


class _Listed:
    """Reads whether a model is listed; `path` empty: from wherever."""

    __slots__ = ("_model", "_path")

    def __init__(self, model: str, path: str = "") -> None:
        self._model = model
        self._path = path

    def read(self, answers: Sequence[Answer]) -> Outcome:
        """Again while it is not."""
        cards = _cards(answers[0])
        if cards is None:
            return Again(f"the list of models: {_words(answers[0])}")
        card = cards.get(self._model)
        if card is None:
            return Again(f"{self._model!r} is not among its {len(cards)} models")
        if self._path and card.root is not None and card.root != self._path:
            return Again(f"{self._model!r} is loaded from {card.root}")
        return Done()


class Sleep:
    """vLLM, awake or asleep."""

    __slots__ = ("_level",)

    def __init__(self, level: int = 1) -> None:
        self._level = level

    def look(self) -> Errand:
        """Whether it is awake."""
        return Errand((_IS_SLEEPING,), self._looked)

    def load(self, before: Before) -> Errand | Failed:
        """Wakes it up; one that is awake stays so."""
        return Errand((Request(b"POST", b"/wake_up"), _IS_SLEEPING), self._woken, acts=True)

    def ready(self) -> Errand:
        """Whether it is awake."""
        return Errand((_IS_SLEEPING,), self._is_awake)

    def drained(self, before: Before) -> Errand | Done:
        """It is the same model."""
        return Done()

    def unload(self) -> Errand:
        """Sends it to sleep."""
        request = Request(b"POST", b"/sleep?level=%d" % self._level)
        return Errand((request, _IS_SLEEPING), self._asleep, acts=True)

    def revert(self, before: Before) -> Errand | Failed:
        """As it was: awake or asleep."""
        return Errand((), self._as_it_was) if before.loaded else self.unload()

    def restored(self, before: Before) -> Errand:
        """Whether it is awake."""
        return self.ready()

    def _looked(self, answers: Sequence[Answer]) -> Outcome:
        asleep = _asleep(answers[0])
        if asleep is None:
            return Failed(DEV_MODE) if answers[0].status == 404 else _unexpected("is_sleeping", answers[0])
        return Done("it is asleep" if asleep else "it is awake", Before(not asleep))

    def _as_it_was(self, answers: Sequence[Answer]) -> Outcome:
        return Done("it was awake before")

    def _is_awake(self, answers: Sequence[Answer]) -> Outcome:
        asleep = _asleep(answers[-1])
        if asleep is None:
            return Again(_words(answers[-1]))
        return Again("it is asleep") if asleep else Done("it is awake")

    def _woken(self, answers: Sequence[Answer]) -> Outcome:
        return self._is_awake(answers) if answers[0].status == 200 else Failed(_words(answers[0]))

    def _asleep(self, answers: Sequence[Answer]) -> Outcome:
        if answers[0].status != 200:
            return Failed(DEV_MODE if answers[0].status == 404 else _words(answers[0]))
        if not _asleep(answers[-1]):
            return Again("it is still awake")
        lost = ": it wakes up without its weights" if self._level == 2 else ""
        return Done(f"it is asleep, level {self._level}{lost}")


class Apart:
    """A model that has an endpoint of its own: nothing is loaded there, and it is asked whether it serves."""

    __slots__ = ("_endpoint", "_model")

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = endpoint.engine_model or model

    def ready(self) -> Errand:
        """As its server says it: the model's own word where it has one."""
        endpoint = self._endpoint
        front = front_of(endpoint)
        if endpoint.engine == "triton" and front == "generate":
            path = f"/v2/models/{quote(self._model, safe='/')}/ready"
            return Errand((Request(b"GET", path.encode()),), self._is_well)
        if front == "openai":
            return Errand((_MODELS,), _Listed(self._model).read)
        return Errand((Request(b"GET", b"/healthz" if front == "gateway" else b"/health"),), self._is_well)

    def leave(self, how: str, level: int = 1) -> Errand | Failed:
        """Ends it: `unload` (Triton), `sleep` (vLLM) or `terminate` (MII's gateway)."""
        endpoint = self._endpoint
        if how == "unload" and endpoint.engine == "triton":
            return Repository(self._model.partition("/")[0]).unload()
        if how == "sleep" and endpoint.engine == "vllm":
            return Sleep(level).unload()
        if how == "terminate" and front_of(endpoint) == "gateway":
            return Errand((Request(b"GET", b"/terminate"),), self._terminated, acts=True)
        return Failed(f"{endpoint.engine}/{front_of(endpoint)} does not know how to {how}")

    def _is_well(self, answers: Sequence[Answer]) -> Outcome:
        return Done() if answers[0].status == 200 else Again(_words(answers[0]))

    def _terminated(self, answers: Sequence[Answer]) -> Outcome:
        answer = answers[0]
        if answer.status == 200:
            return Done(_words(answer))
        return Failed(_words(answer)) if answer.reached else Done("nobody answers there any more")


def forgets(endpoint: Endpoint, streams: bool = False) -> Errand | Done:
    """How an endpoint that changed its model in place is kept from answering out of what the old one had computed.

    `streams`: it has some, whose part of the cache is to be computed anew as well. The outcome Failed means that it
    cannot be told to; then its requests need another `cache_salt`.
    """
    if endpoint.engine == "vllm":
        target = b"/reset_prefix_cache?reset_running_requests=true" if streams else b"/reset_prefix_cache"
        return Errand((Request(b"POST", target),), _was_reset, acts=True)
    return Done("a new instance has a cache of its own")


# What stands in answers.


class _Entry(msgspec.Struct, frozen=True):
    name: str
    version: str = ""
    state: str = ""


class _Card(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct, frozen=True):
    data: list[_Card]


class _Asleep(msgspec.Struct, frozen=True):
    is_sleeping: bool


class _Success(msgspec.Struct, frozen=True):
    success: bool


class _Detail(msgspec.Struct, frozen=True):
    detail: str


_INDEX: Final = Request(b"POST", b"/v2/repository/index", b"{}")
_MODELS: Final = Request(b"GET", b"/v1/models")
_IS_SLEEPING: Final = Request(b"GET", b"/is_sleeping")

_encode: Final = msgspec.json.Encoder().encode


def _read(kind: type, body: bytes) -> Any:
    """What a body says; None: it is none of that kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _states(answer: Answer, model: str) -> dict[str, str] | None:
    """The versions of a model in the index, with their states; None: it is no index."""
    entries: list[_Entry] | None = _read(list[_Entry], answer.body) if answer.status == 200 else None
    if entries is None:
        return None
    return {entry.version: entry.state for entry in entries if entry.name == model and entry.state}


def _cards(answer: Answer) -> dict[str, _Card] | None:
    """The list of models by name; None: it is none."""
    cards: _Cards | None = _read(_Cards, answer.body) if answer.status == 200 else None
    return None if cards is None else {card.id: card for card in cards.data}


def _asleep(answer: Answer) -> bool | None:
    told: _Asleep | None = _read(_Asleep, answer.body) if answer.status == 200 else None
    return None if told is None else told.is_sleeping


def _was_reset(answers: Sequence[Answer]) -> Outcome:
    answer = answers[0]
    told: _Success | None = _read(_Success, answer.body)
    if answer.status == 200 and told is None:
        # So did releases that told nothing.
        return Done("it was told to reset its prefix cache, and does not say whether it did")
    if answer.status == 200 and told is not None and told.success:
        return Done("the prefix cache was reset")
    # Blocks that a request holds cannot be freed.
    return Again("the prefix cache is in use") if answer.status == 200 else Failed(_words(answer))


def _is_no_route(answer: Answer) -> bool:
    """Whether the server has no such path: FastAPI's own 404, and not one that the engine words."""
    return answer.status in (404, 405) and _read(_Detail, answer.body) is not None


def _with_versions(config: str, versions: Sequence[str]) -> str:
    """A Triton configuration that has these versions served and no others; empty where it cannot be made."""
    try:
        said = json.loads(config)
        numbers = [int(version) for version in versions]
    except (ValueError, RecursionError):
        return ""
    if not isinstance(said, dict) or not numbers:
        return ""
    return json.dumps({**said, "version_policy": {"specific": {"versions": numbers}}})


def _named(versions: Sequence[str]) -> str:
    return f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(versions)}"


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() else 0


def _unexpected(what: str, answer: Answer) -> Outcome:
    """An answer that is not what was asked for: of an engine that is away, it may come yet."""
    return Again(f"{what}: {_words(answer)}") if not answer.status else Failed(f"{what}: {_words(answer)}")


def _words(answer: Answer) -> str:
    """An answer for people."""
    if not answer.status:
        return answer.detail or "no answer"
    error = read_error(answer.body[: 1 << 16])
    words = " ".join(error.message.split()) if error is not None else ""
    return f"{answer.status}: {words[:MAX_WORDS]}" if words else f"it answers {answer.status}"
