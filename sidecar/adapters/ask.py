"""What a client asks of an engine that does not speak its language: the request's body, read once, in full.

Where nothing is translated the body stays bytes, and `wire.call` reads the few fields that route it. Here it is read as
far as an engine can be told of it. What is not named is not passed on: an engine that never heard of a field either
ignores it or refuses it, and neither tells the client. What would change the answer if it were dropped is a *need*
instead, by the name of its field: an engine that lacks it is not asked (`needs_of`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.call import Api, Call
from sidecar.wire.lenient import read_as
from sidecar.wire.shapes import Number

Flag = bool | int | str | None
"""What engines take for a boolean (pydantic's lax mode)."""


class StreamOptions(msgspec.Struct, frozen=True, gc=False):
    """`stream_options`."""

    include_usage: Flag = None


class Body(msgspec.Struct, frozen=True):
    """The body of a chat or completions request, as much of it as any engine can be told.

    Members are typed where we must understand them; the engine is the judge of the others.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    stream_options: StreamOptions | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    min_p: Number = None
    seed: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    min_tokens: Number = None
    ignore_eos: Flag = None
    stop: str | list[str] | None = None
    best_of: Number = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    tools: Any = None
    functions: Any = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logit_bias: Any = None
    modalities: list[Any] | None = None
    echo: Any = None
    suffix: Any = None
    add_generation_prompt: Flag = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Flag = None
    documents: Any = None
    include_stop_str_in_output: Flag = None
    prompt_embeds: Any = None
    return_token_ids: Flag = None
    skip_special_tokens: Flag = None
    stop_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Flag = None


VLLM_OWN: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            "add_generation_prompt",
            "allowed_token_ids",
            "bad_words",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "documents",
            "include_stop_str_in_output",
            "prompt_embeds",
            "return_token_ids",
            "skip_special_tokens",
            "stop_token_ids",
            "truncate_prompt_tokens",
            "use_beam_search",
        ),
        "only vLLM knows it",
    )
)
"""Members of vLLM's own that change the answer, as needs that no other engine meets."""


_USUAL: Final = ("add_generation_prompt", "skip_special_tokens")
"""Of those, flags that are set where a client does not say otherwise."""


_decode: Final = msgspec.json.Decoder(Body).decode


class Ask:
    """One request as a dialect gets it.

    `model`: the client's name for it, which the answer names; `engine_model`: the engine's. `prompt`: what is to be
    completed, a chat's already through its template where the front has none (empty for a chat that its front makes a
    prompt of), `prompt_size` its characters. `max_tokens`: None where the engine's default holds. `usage`: a stream's
    usage is wanted. `request_id` is safe in a header and in JSON. `created`: seconds since the epoch.
    """

    __slots__ = (
        "api",
        "body",
        "created",
        "engine_model",
        "max_tokens",
        "model",
        "prompt",
        "prompt_size",
        "request_id",
        "stream",
        "usage",
    )

    def __init__(
        self, call: Call, body: Body, *, engine_model: str, prompt: str, request_id: str, created: int
    ) -> None:
        self.api = call.api
        self.body = body
        self.created = created
        self.engine_model = engine_model or call.model
        self.max_tokens = call.max_tokens
        self.model = call.model
        self.prompt = prompt
        self.request_id = request_id
        self.stream = call.stream
        self.prompt_size = len(prompt) or sum(len(text_of(each.get("content"))) for each in body.messages or [])
        options = body.stream_options
        self.usage = call.stream and options is not None and is_set(options.include_usage)

    def sent(self) -> None:
        """It was put into an engine's words: what it asked, perhaps megabytes, is let go while the answer flows."""
        self.body = _NOTHING
        self.prompt = ""


_NOTHING: Final = Body()

MOST_BYTES: Final = 4 << 20
"""Of a body that is translated, a million tokens of prose: read, made a prompt of and written anew in some 40 ms."""

MOST_VALUES: Final = 30_000
"""In it, counted as commas and brackets outside of strings. Each is built, a message is shown to a template as well: as
many as fit into a body would keep everybody waiting for seconds."""


def read_body(data: bytes) -> Body:
    """Reads a chat or completions body.

    Raises `SidecarError`: `BAD_REQUEST` naming the field that cannot be read, `TOO_LARGE` for more than is put into an
    engine's words while all others wait.
    """
    if len(data) > MOST_BYTES:
        raise _too_large(f"the body exceeds {MOST_BYTES} bytes")
    if len(data) > MOST_VALUES and _has_many(data):
        raise _too_large(f"the body has more than {MOST_VALUES} values")
    try:
        return _decode(data)
    except msgspec.ValidationError as exc:
        raise _bad(exc) from exc
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return read_as(data, Body)
    except (ValueError, RecursionError) as exc:
        raise _bad(exc) from exc


def _has_many(data: bytes) -> bool:
    if _values_in(data) <= MOST_VALUES:
        return False
    # Most of them may be a prompt's own: what stands outside of strings counts.
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 4 * MOST_VALUES:
        return True  # two strings to a value, a name and a text
    return _values_in(b"".join(data.split(b'"')[::2])) > MOST_VALUES


def _values_in(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def needs_of(api: Api, n: int, body: Body | None) -> frozenset[str]:
    """What an engine must be able to do beyond one answer in text, by the names of the fields that ask for it.

    An API that is neither chat nor completions (`body` None) is a need itself: `responses`, `messages`, `embeddings`,
    `other`.
    """
    if body is None:
        return frozenset({api.value})
    needs = {"chat"} if api is Api.CHAT else set[str]()
    if n > 1:
        needs.add("n")
    if _number(body.best_of) > 1:
        needs.add("best_of")
    if body.tools or body.functions:
        needs.add("tools")
    if _asks(body.logprobs) or _asks(body.prompt_logprobs) or body.top_logprobs:
        needs.add("logprobs")
    kind = body.response_format.get("type") if body.response_format is not None else None
    if kind not in (None, "text"):
        needs.add("response_format")
    if any((body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)):
        needs.add("structured_outputs")
    if body.logit_bias:
        needs.add("logit_bias")
    if body.modalities is not None and body.modalities != ["text"]:
        needs.add("modalities")
    if is_set(body.echo):
        needs.add("echo")
    if body.suffix:
        needs.add("suffix")
    if isinstance(body.prompt, list) and not (len(body.prompt) == 1 and isinstance(body.prompt[0], str)):
        needs.add("prompt")
    if body.messages is not None:
        if any(_has_media(message) for message in body.messages):
            needs.add("content")
        if any(message.get("tool_calls") for message in body.messages):
            needs.add("tool_calls")
    if isinstance(body.stop, list) and len(body.stop) > 1:
        needs.add("stop")
    for name, value, nothing in (
        ("presence_penalty", body.presence_penalty, 0.0),
        ("frequency_penalty", body.frequency_penalty, 0.0),
        ("repetition_penalty", body.repetition_penalty, 1.0),
        ("min_p", body.min_p, 0.0),
    ):
        if value is not None and _number(value) != nothing:
            needs.add(name)
    if is_set(body.ignore_eos):
        needs.add("ignore_eos")
    for name in VLLM_OWN:
        value = getattr(body, name)
        if value is not None and is_set(value) is not (name in _USUAL):
            needs.add(name)
    return frozenset(needs)


def text_of(content: object) -> str:
    """A message's content as text: a text as it is, text parts one per line (as vLLM joins them), nothing as empty."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return ""


def messages_of(body: Body) -> list[dict[str, Any]]:
    """The messages of a chat, each with its content as one text."""
    return [{**message, "content": text_of(message.get("content"))} for message in body.messages or []]


def prompt_of(body: Body) -> str:
    """The one text to be completed; empty where there is none (several are a need)."""
    prompt = body.prompt
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt and isinstance(prompt[0], str) else ""
    return prompt or ""


def is_set(flag: object) -> bool:
    """Whether a flag is true, as engines read one; of what is no flag, whether it says anything."""
    return flag.lower() not in _FALSE if isinstance(flag, str) else bool(flag)


_FALSE: Final = frozenset({"", "false", "0", "off", "f", "n", "no"})


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return not all(_is_text(part) for part in content)
    return content is not None and not isinstance(content, str)


def _is_text(part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(part.get("text"), str) and part.get("type", "text") in _TEXTS
    return isinstance(part, str)


_TEXTS: Final = ("text", "input_text", "output_text")


def _part_text(part: object) -> str:
    if isinstance(part, dict):
        part = part.get("text")
    return part if isinstance(part, str) else ""


def _asks(logprobs: object) -> bool:
    # Completions: a count, of which 0 asks for the chosen token's. Chat: a flag.
    return logprobs is not None and logprobs is not False


def _number(value: Number) -> float:
    try:
        return float(value or 0)
    except (ValueError, OverflowError):
        return 0.0


def _too_large(what: str) -> SidecarError:
    return SidecarError(Reason.TOO_LARGE, "downstream", f"{what}, which is the most that is translated for an engine")


def _bad(exc: Exception) -> SidecarError:
    text = str(exc)
    what, at, where = text.partition(" - at `$.")
    detail = f"{where.rstrip('`')}: {what[:1].lower()}{what[1:]}" if at else text[:1].lower() + text[1:]
    return SidecarError(Reason.BAD_REQUEST, "downstream", detail)
