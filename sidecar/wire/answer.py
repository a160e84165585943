"""The few facts we read of a whole JSON answer: error, usage, why it ended.

Engines disagree on what an error looks like, so all shapes met are read here and nowhere else:
`{"error": {...}}`, `{"error": "text"}`, flat `{"object": "error", ...}` and `{"type": "error", ...}`,
`{"detail": ...}`, `{"message": ...}`; and, where the status already says that it failed, an event stream of one error
event, or plain text.
"""

import json
from typing import Final

import msgspec

from sidecar.wire.call import Api
from sidecar.wire.lenient import python_json, read_as
from sidecar.wire.shapes import AnswerBody, decode_answer

_TEXT_LIMIT: Final = 512
"""Characters kept of an error's text: what classifies stands at its start, what follows is often the prompt."""


_MOST_TOKENS: Final = 1 << 53
_WRAPPINGS: Final = 3
"""Times that an `error` is looked for inside an `error` or `detail`: gateways wrap what their engine said once."""


_CHAT: Final = Api.CHAT
_COMPLETIONS: Final = Api.COMPLETIONS
_RESPONSES: Final = Api.RESPONSES
_MESSAGES: Final = Api.MESSAGES
_EMBEDDINGS: Final = Api.EMBEDDINGS
_OTHER: Final = Api.OTHER


class AnswerError(msgspec.Struct, frozen=True):
    """An error as an engine words it. `type` is empty and `code` None where it names none.

    `message` is cut to 512 characters and may quote the prompt: it classifies, it does not go to a log.
    """

    message: str
    type: str = ""
    code: int | str | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counts them; None where it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """What a whole body says. `malformed`: it is neither the JSON object that its API promises nor an error."""

    error: AnswerError | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    malformed: bool = False


def read_answer(api: Api | None, body: bytes, *, status: int = 200) -> Answer:
    """Reads a whole non-stream body; never raises.

    `api` None is an answer to something that is no inference. `status` decides how far an error is looked for: bare
    `detail` and `message` members are an error where the status says so, or where an inference answer lacks all that
    its API promises; in somebody else's 200 they are data.
    """
    failed = status >= 400
    try:
        parsed = _decode(body)
    except (ValueError, RecursionError):
        error = read_error(body, soft=failed)
        return Answer(error=error, malformed=error is None)
    whole = _is_whole(api, parsed)
    soft = failed or not (whole or api is None or api is _OTHER)
    error = _error_of(parsed.error, parsed.kind, parsed.type, parsed.code, parsed.message, parsed.detail, soft=soft)
    return Answer(
        error=error,
        usage=usage_of(parsed.usage),
        finish_reason=_finish_of(parsed),
        malformed=not whole and error is None,
    )


def is_json(body: bytes) -> bool:
    """Whether `body` is JSON as Python's engines write it (NaN and lone surrogates included). For rare use: slow."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def read_error(body: bytes, *, soft: bool = True) -> AnswerError | None:
    """The error that `body` tells, in any shape; None for an empty body.

    With `soft`, whatever the body is, it is an error: bare members, an event stream or plain text are read too.
    Without it only what names itself an error is one.
    """
    text = body.strip()
    if soft and text.startswith((b"data:", b"event:")):
        # A stream whose first event failed: the status was changed, the media type was not.
        lines = text.replace(b"\r", b"\n")
        _, found, rest = (b"\n" + lines).partition(b"\ndata:")
        text = rest.partition(b"\n")[0].strip() if found else text
    try:
        parsed = python_json(text)
    except (ValueError, RecursionError):
        return AnswerError(text[:_TEXT_LIMIT].decode("utf-8", "replace")) if soft and text else None
    if isinstance(parsed, dict):
        return error_in(parsed, soft=soft)
    return AnswerError(_text(parsed)) if soft and parsed else None


def error_in(parsed: dict[str, object], *, soft: bool) -> AnswerError | None:
    """As `read_error`, of a JSON object that is already built."""
    get = parsed.get
    return _error_of(get("error"), get("object"), get("type"), get("code"), get("message"), get("detail"), soft=soft)


def _decode(body: bytes) -> AnswerBody:
    try:
        return decode_answer(body)
    except msgspec.DecodeError:
        return read_as(body, AnswerBody)


def usage_of(body: object, before: Usage | None = None) -> Usage | None:
    """A `usage` member, in any API's words; what it leaves out or garbles stays as it was `before`."""
    if not isinstance(body, dict):
        return before
    prompt = _count(body, "prompt_tokens", "input_tokens")
    completion = _count(body, "completion_tokens", "output_tokens")
    if before is not None:
        prompt = before.prompt_tokens if prompt is None else prompt
        completion = before.completion_tokens if completion is None else completion
    return Usage(prompt, completion)


def _count(body: dict[str, object], name: str, other_name: str) -> int | None:
    value = body.get(name)
    if value is None:
        value = body.get(other_name)
    # Beyond are no counts: 1e400 is good JSON and an infinite float, and not every integer is a float.
    if isinstance(value, int | float) and -_MOST_TOKENS < value < _MOST_TOKENS:
        return int(value)
    return None


def error_from(value: object) -> AnswerError:
    """An error object's (or text's) words, whatever its shape."""
    for _ in range(_WRAPPINGS):
        if isinstance(value, dict) and "message" not in value and value.get("error"):
            value = value["error"]
    if isinstance(value, dict):
        message = value.get("message") or value.get("msg") or value.get("detail")
        return AnswerError(_text(message if message else value), _name(value.get("type")), _code(value.get("code")))
    return AnswerError(_text(value))


def _error_of(
    error: object, kind: object, type_: object, code: object, message: object, detail: object, *, soft: bool
) -> AnswerError | None:
    if error:
        found = error_from(error)
        # A text beside its own type and code: `{"error": "no such model", "code": 404}`.
        return AnswerError(
            found.message, found.type or _flat_name(type_), _code(code) if found.code is None else found.code
        )
    if kind == "error" or type_ == "error":
        return AnswerError(_text(message or detail), _flat_name(type_), _code(code))
    if soft and message and isinstance(message, str):
        return AnswerError(_text(message), _flat_name(type_), _code(code))
    if soft and detail:
        return error_from(detail)
    return None


def _is_whole(api: Api | None, body: AnswerBody) -> bool:
    if api is _CHAT or api is _COMPLETIONS:
        return body.choices is not None
    if api is _RESPONSES:
        return _is_there(body.output) or body.status is not None
    if api is _MESSAGES:
        return _is_there(body.content)
    if api is _EMBEDDINGS:
        return _is_there(body.data)
    return True


def _is_there(raw: msgspec.Raw) -> bool:
    return memoryview(raw).nbytes > 0


def _finish_of(body: AnswerBody) -> str | None:
    choices = body.choices
    if choices:
        for number in range(len(choices) - 1, -1, -1):
            word = word_of(choices[number].finish_reason)
            if word:
                return word
        return None
    return word_of(body.stop_reason) or reason_of(body.incomplete_details) or word_of(body.status)


def reason_of(details: object) -> str | None:
    """`incomplete_details.reason`, if there is one."""
    return word_of(details.get("reason")) if isinstance(details, dict) else None


def word_of(value: object) -> str | None:
    """A short text such as a finish reason; None for an empty one or another type."""
    return value[:_TEXT_LIMIT] if value and isinstance(value, str) else None


def _text(value: object) -> str:
    if isinstance(value, str):
        return value[:_TEXT_LIMIT]
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)[:_TEXT_LIMIT]
    except RecursionError:
        return ""


def _name(value: object) -> str:
    return value[:_TEXT_LIMIT] if isinstance(value, str) else ""


def _flat_name(value: object) -> str:
    return "" if value == "error" else _name(value)


def _code(value: object) -> int | str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 6 else value[:_TEXT_LIMIT]
    return None
