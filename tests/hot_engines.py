"""Engines that load and unload models as the real ones were seen to, in one process and without sockets.

Answers are those of the captures (`tests/captures`), as far as a model update reads them. Each can be told to break at
a path: to answer otherwise, or not at all.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sidecar.adapters.errand import Answer, Request

JSON = b"application/json"
HANGS = Answer(0)
"""It takes the request and never answers."""


def told(said: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(said).encode(), JSON)


class Engine:
    """What they have in common: whoever asks is written down, and a path may be broken."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: dict[str, Callable[[], Answer | None]] = {}
        self.silent: set[str] = set()
        """Paths that are obeyed once, and not answered."""
        self.down = False

    def break_at(self, path: str, answer: Answer, times: int = 1_000_000) -> None:
        """The next requests whose path contains `path` get this; what they ask is not done."""
        left = [times]

        def breaks() -> Answer | None:
            left[0] -= 1
            return answer if left[0] >= 0 else None

        self.broken[path] = breaks

    def answer(self, request: Request) -> Answer:
        path = request.target.decode()
        self.asked.append(f"{request.method.decode()} {path}")
        for part, breaks in self.broken.items():
            if part in path and (broken := breaks()) is not None:
                return broken
        answer = self.does(request.method.decode(), path, json.loads(request.body) if request.body else {})
        for part in list(self.silent):
            if part in path:
                self.silent.discard(part)
                return HANGS
        return answer

    def does(self, method: str, path: str, said: dict[str, Any]) -> Answer:
        raise NotImplementedError

    def said(self, part: str) -> list[str]:
        """Who asked for a path that contains `part`."""
        return [each for each in self.asked if part in each]


class TritonEngine(Engine):
    """`disk`: a model's versions with what they say; `served`: those that are loaded. An old version is `UNLOADING`
    while `streams` of it are under way."""

    def __init__(self, disk: Mapping[str, dict[str, str]], *loaded: str) -> None:
        super().__init__()
        self.disk = {model: dict(versions) for model, versions in disk.items()}
        self.served: dict[str, dict[str, str]] = {}
        self.states: dict[str, dict[str, str]] = {}
        self.streams: dict[tuple[str, str], int] = {}
        for model in loaded:
            self.load(model, [max(disk[model])])

    def load(self, model: str, versions: list[str]) -> None:
        old = self.served.get(model, {})
        self.served[model] = {version: self.disk[model][version] for version in versions}
        states = dict.fromkeys(versions, "READY")
        for version in {**self.states.get(model, {}), **old}:
            if version not in versions:
                states[version] = "UNLOADING" if self.streams.get((model, version)) else "UNAVAILABLE"
        self.states[model] = states

    def does(self, method: str, path: str, said: dict[str, Any]) -> Answer:
        parts = path.split("/")
        if path == "/v2/repository/index":
            return told(
                [
                    {"name": model, "version": version, "state": self._state(model, version)}
                    for model in self.disk
                    for version in self.states.get(model, {})
                ]
                + [{"name": model} for model in self.disk if model not in self.states]
            )
        if path.startswith("/v2/repository/models/"):
            model, verb = parts[4], parts[5]
            if verb == "unload":
                self.load(model, []) if model in self.disk else None
                return Answer(200, b"", JSON)
            if model not in self.disk:
                return told({"error": f"failed to load '{model}', failed to poll from model repository"}, 500)
            config = said.get("parameters", {}).get("config", "")
            policy = json.loads(config).get("version_policy", {}) if config else {}
            numbers = policy.get("specific", {}).get("versions", [max(self.disk[model])])
            self.load(model, [str(number) for number in numbers])
            return Answer(200, b"", JSON)
        model = parts[3]
        served = self.served.get(model, {})
        version = parts[5] if len(parts) > 5 and parts[4] == "versions" else max(served, default="")
        if parts[-1] == "config":
            if not served:
                return told({"error": "Request for unknown model: 'x' is not found"}, 400)
            return told({"name": model, "backend": "python", "version_policy": {"latest": {"num_versions": 1}}})
        if version not in served:
            return told({"error": "Model version not ready"}, 400)
        if parts[-1] == "ready":
            return Answer(200)
        event = {"model_name": model, "model_version": version, "text_output": served[version], "finish_reason": "stop"}
        return Answer(200, b"data: %b\n\n" % json.dumps(event).encode(), b"text/event-stream")

    def _state(self, model: str, version: str) -> str:
        state = self.states[model][version]
        if state == "UNLOADING" and not self.streams.get((model, version)):
            state = self.states[model][version] = "UNAVAILABLE"
        return state


class VllmEngine(Engine):
    """`adapters`: names with their folders; `texts`: what each folder says. `dev`: started in development mode."""

    def __init__(self, base: str = "tiny", *, dev: bool = True, lora: bool = True) -> None:
        super().__init__()
        self.base = base
        self.dev = dev
        self.lora = lora
        self.texts = {"/base": " Paris"}
        self.adapters: dict[str, str] = {}
        self.asleep = False
        self.running = 0
        self.resets = 0
        self.canaries: list[str] = []
        self.missing: set[str] = set()

    def does(self, method: str, path: str, said: dict[str, Any]) -> Answer:
        not_found = told({"detail": "Not Found"}, 404)
        if path.startswith(("/is_sleeping", "/sleep", "/wake_up", "/reset_prefix_cache")) and not self.dev:
            return not_found
        if "lora_adapter" in path and not self.lora:
            return not_found
        match path.partition("?")[0]:
            case "/v1/models":
                cards = [{"id": self.base, "root": "/base", "parent": None}]
                cards += [{"id": name, "root": root, "parent": self.base} for name, root in self.adapters.items()]
                return told({"object": "list", "data": cards})
            case "/v1/load_lora_adapter":
                return self._load(said)
            case "/v1/unload_lora_adapter":
                name = said["lora_name"]
                if self.adapters.pop(name, None) is None:
                    return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
                return Answer(200, f"Success: LoRA adapter '{name}' removed successfully.".encode())
            case "/is_sleeping":
                return told({"is_sleeping": self.asleep})
            case "/sleep":
                self.asleep = True
                return told({"status": "sleeping", "level": 1})
            case "/wake_up":
                self.asleep = False
                return told({"status": "awake", "tags": None})
            case "/reset_prefix_cache":
                free = not self.running or "reset_running_requests=true" in path
                self.resets += free
                return told({"success": free})
            case "/metrics":
                page = b"vllm:num_requests_running %d.0\nvllm:num_requests_waiting 0.0\n" % self.running
                return Answer(200, page, b"text/plain")
            case "/v1/completions":
                self.canaries.append(json.dumps(said))
                return self._complete(said["model"])
        return not_found

    def _load(self, said: dict[str, Any]) -> Answer:
        name, path = said["lora_name"], said["lora_path"]
        if path in self.missing:
            return error(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        if name in self.adapters and not said.get("load_inplace"):
            return error(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = path
        return Answer(200, f"Success: LoRA adapter '{name}' added successfully.".encode())

    def _complete(self, model: str) -> Answer:
        if self.asleep:
            return HANGS
        root = "/base" if model == self.base else self.adapters.get(model)
        if root is None:
            return error(404, "NotFoundError", f"The model `{model}` does not exist.")
        choice = {"index": 0, "text": self.texts.get(root, " ?"), "finish_reason": "length"}
        return told({"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice]})


class MiiEngine(Engine):
    """A RESTful gateway of one deployment."""

    def __init__(self, deployment: str, text: str = " Paris") -> None:
        super().__init__()
        self.deployment = deployment
        self.text = text

    def does(self, method: str, path: str, said: dict[str, Any]) -> Answer:
        if path == "/healthz":
            return Answer(200, b"ok", b"text/html")
        if path == "/terminate":
            self.down = True
            return Answer(200, b"Shutting down RESTful API gateway server", b"text/html")
        if path != f"/mii/{self.deployment}":
            return told({"message": "Internal Server Error"}, 500)
        answer = {"generated_text": self.text, "prompt_length": 5, "generated_length": 1, "finish_reason": "length"}
        return told([answer])


def error(status: int, kind: str, message: str) -> Answer:
    """As vLLM words it."""
    return told({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


GAP_S = 0.01
"""Between the events of a stream."""


@contextlib.asynccontextmanager
async def listening(engine: Engine, words: int = 10) -> AsyncIterator[int]:
    """The engine on a port of 127.0.0.1. A stream of it has `words` events, each with all that it has to say."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                method, target, _ = lines[0].split(b" ")
                size = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
                body = await reader.readexactly(size)
                answer = engine.answer(Request(method, target, body))
                if not answer.status:
                    await asyncio.Event().wait()
                streams = answer.content_type == b"text/event-stream" or b'"stream":true' in body.replace(b" ", b"")
                kind = b"text/event-stream" if streams and answer.status == 200 else answer.content_type
                head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n" % (answer.status, kind)
                if not (streams and answer.status == 200):
                    writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(answer.body), answer.body))
                    continue
                writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
                openai = answer.content_type == JSON
                event = b"data: %b\n\n" % answer.body if openai else answer.body
                for _ in range(words):
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    await asyncio.sleep(GAP_S)
                if openai:
                    writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
                writer.write(b"0\r\n\r\n")
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in writers:
            each.transport.abort()
        await asyncio.sleep(0.01)
