"""A model's chat template: a chat's messages in, the prompt out, as the model's own tokenizer would write it.

For engines that complete text and know no chats. Templates are Jinja, come with the model and are written against what
transformers gives them (`apply_chat_template` of its version 5: environment, filters, functions, variables), so that is
what they get here, and the prompt is the same to the letter:

1. A template is a stranger's program. It runs in Jinja's immutable sandbox: it sees its arguments and nothing of this
   process, and changes neither. What it raises is a refusal of these messages.
2. Its source and its prompt are bounded, a `range` is (Jinja's 100,000). Its time and what it builds without writing it
   are not: one that loops for ever in itself stops this sidecar, as it would stop an engine.
3. Engines that complete text put the token that begins a text before it, if their tokenizer does; many templates write
   it as well. `adds_bos` takes the template's away, since a model that gets two answers worse.
4. Messages are as vLLM prepares them: contents are texts (`ask.messages_of`), the arguments of tool calls are no longer
   text but what it says.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sidecar.adapters.ask import MOST_VALUES
from sidecar.kernel.errors import Reason, SidecarError

MAX_TEMPLATE: Final = 1 << 20
"""Characters; the longest of well-known models have some 20,000."""

MAX_PROMPT: Final = 8 << 20
"""Characters: twice the largest body that is translated (`ask.MOST_BYTES`)."""

MAX_SAID: Final = 1000
"""Of what a template raises; it may hold what the client sent."""

TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
CONFIG, TOKENS, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"

FILES: Final = (TEMPLATE, OLD_TEMPLATE, CONFIG, TOKENS, TOKENIZER)
"""What `template_of` reads of a model folder, as far as it is there."""


class _Raised(TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}`: marks what a model is trained to say; nothing where prompts are made."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One template, ready to render.

    `tokens`: the special tokens by the names that templates know (`bos_token`, `eos_token`, ...). `adds_bos`: the
    engine's tokenizer puts `bos_token` before a prompt. `clock`: seconds since the epoch, for templates that tell the
    model what day it is. Raises ValueError, with the line, for what is no template.
    """

    __slots__ = ("_bos", "_template", "_tokens")

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        *,
        adds_bos: bool = False,
        clock: Callable[[], float],
    ) -> None:
        if len(source) > MAX_TEMPLATE:
            raise ValueError(f"is longer than {MAX_TEMPLATE} characters")
        self._tokens = dict(tokens or {})
        self._bos = self._tokens.get("bos_token", "") if adds_bos else ""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(clock()).strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as exc:
            raise ValueError(f"line {exc.lineno}: {exc.message}") from exc
        except Exception as exc:
            # Python compiles what Jinja makes of it, with limits of its own: the depth of blocks, of expressions.
            raise ValueError(f"cannot be compiled: {exc}") from exc

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises `SidecarError`: `BAD_REQUEST` for messages that the template refuses or cannot work with, `UNSUPPORTED`
        where it does what no template may.
        """
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise _bad(f"messages[{index}].role is missing")
        if _argued(messages) > MOST_VALUES:
            raise _bad(f"the arguments of tool calls have more than {MOST_VALUES} values")
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=[_prepared(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            ):
                size += len(part)
                if size > MAX_PROMPT:
                    break
                parts.append(part)
        except _Raised as exc:
            raise _bad(str(exc)[:MAX_SAID]) from exc
        except SecurityError as exc:
            said = f"the model's chat template does what none may: {str(exc)[:MAX_SAID]}"
            raise SidecarError(Reason.UNSUPPORTED, "local", said) from exc
        except Exception as exc:
            raise _bad(f"the model's chat template cannot use these messages: {str(exc)[:MAX_SAID]}") from exc
        if size > MAX_PROMPT:
            raise _bad(f"the prompt exceeds {MAX_PROMPT} characters")
        return "".join(parts).removeprefix(self._bos)


def template_of(files: Mapping[str, bytes], *, clock: Callable[[], float]) -> ChatTemplate:
    """The template of a model folder; `files`: the contents of those of `FILES` that are there, by name.

    Raises ValueError, beginning with the file at fault where it is one.
    """
    config = _read(files, CONFIG, _Config) or _Config()
    tokens = _tokens(config) or _tokens(_read(files, TOKENS, _Config) or _Config())
    adds_bos = config.add_bos_token
    bos = tokens.get("bos_token")
    if adds_bos is None:
        tokenizer = _read(files, TOKENIZER, _Tokenizer)
        adds_bos = tokenizer is not None and bos is not None and _begins_with(tokenizer.post_processor, bos)
    name, source = _source(files, config)
    try:
        return ChatTemplate(source, tokens, adds_bos=adds_bos, clock=clock)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Token(msgspec.Struct, frozen=True):
    content: str


_Written = str | _Token | None


class _Config(msgspec.Struct, frozen=True):
    chat_template: str | list[_Named] | None = None
    add_bos_token: bool | None = None
    bos_token: _Written = None
    eos_token: _Written = None
    unk_token: _Written = None
    sep_token: _Written = None
    pad_token: _Written = None
    cls_token: _Written = None
    mask_token: _Written = None


class _Piece(msgspec.Struct, frozen=True):
    id: str = ""


class _Slot(msgspec.Struct, frozen=True):
    special: _Piece | None = msgspec.field(name="SpecialToken", default=None)


class _Processor(msgspec.Struct, frozen=True):
    """What a tokenizer puts around a text; a sequence of them, or, of the kinds that matter, a pattern (`single`)."""

    single: list[_Slot] = []
    processors: list["_Processor"] = []


class _Tokenizer(msgspec.Struct, frozen=True):
    post_processor: _Processor | None = None


_TOKENS: Final = tuple(
    name for name in _Config.__struct_fields__ if name.endswith("_token") and name != "add_bos_token"
)


_Shape = TypeVar("_Shape")


def _read(files: Mapping[str, bytes], name: str, shape: type[_Shape]) -> _Shape | None:
    data = files.get(name)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"{name}: {exc}") from exc


def _tokens(config: _Config) -> dict[str, str]:
    found = {}
    for name in _TOKENS:
        token: _Written = getattr(config, name)
        if token is not None:
            found[name] = token if isinstance(token, str) else token.content
    return found


def _source(files: Mapping[str, bytes], config: _Config) -> tuple[str, str]:
    """The file that has the template, and the template."""
    if TEMPLATE in files:
        try:
            return TEMPLATE, files[TEMPLATE].decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"{TEMPLATE}: is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    old = _read(files, OLD_TEMPLATE, _Config)
    name, found = (OLD_TEMPLATE, old.chat_template) if old is not None else (CONFIG, config.chat_template)
    if found is None:
        raise ValueError(f"there is no chat template: neither {TEMPLATE} nor chat_template in {CONFIG}")
    if isinstance(found, str):
        return name, found
    for each in found:
        if each.name == "default":
            return name, each.template
    raise ValueError(f'{name}: none of its chat templates is named "default": {", ".join(each.name for each in found)}')


def _begins_with(processor: _Processor | None, bos: str) -> bool:
    if processor is None:
        return False
    if processor.single:
        first = processor.single[0].special
        return first is not None and first.id == bos
    return any(_begins_with(each, bos) for each in processor.processors)


def _argued(messages: list[dict[str, Any]]) -> int:
    """Values in the texts that `_prepared` reads, counted as `ask.read_body` counts a body's."""
    count = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            said = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(said, str):
                count += said.count(",") + said.count("[") + said.count("{")
    return count


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_prepared_call(call) for call in calls]}


def _prepared_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    said = function["arguments"]
    try:
        arguments = json.loads(said or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own writes HTML's escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _bad(detail: str) -> SidecarError:
    return SidecarError(Reason.BAD_REQUEST, "downstream", detail)
