"""The shapes of each API's stream events: as much of them as we read, and a decoder for each.

Members are typed only where an event's shape hangs on them: a strange one must not hide its neighbours, or an engine
with odd logprobs would seem to send no token at all. What is not named here is skipped, neither built nor judged.
"""

import msgspec

Index = int | float | str | None
"""A choice's index: a number, and whatever else an engine puts there, as long as it can be told from others."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What a chat chunk adds to a choice."""

    role: object = None
    content: object = None
    reasoning_content: object = None
    reasoning: object = None
    tool_calls: object = None
    function_call: object = None
    refusal: object = None
    audio: object = None


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A choice of a chat or completions chunk."""

    index: Index = 0
    delta: Delta | None = None
    text: object = None
    finish_reason: object = None
    logprobs: object = None
    token_ids: object = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """An event of chat or completions."""

    choices: list[Choice] | None = None
    usage: object = None
    error: object = None


class Response(msgspec.Struct, frozen=True, gc=False):
    """The response that a Responses event carries."""

    status: object = None
    error: object = None
    usage: object = None
    incomplete_details: object = None


class Typed(msgspec.Struct, frozen=True, gc=False):
    """Anything of which the type alone is read."""

    type: str = ""


class ResponseEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of Responses."""

    type: str = ""
    delta: object = None
    response: Response | None = None
    item: Typed | None = None
    error: object = None


class BlockDelta(msgspec.Struct, frozen=True, gc=False):
    """What a Messages event adds to a block, or to the message."""

    text: object = None
    partial_json: object = None
    thinking: object = None
    signature: object = None
    citation: object = None
    stop_reason: object = None


class Block(msgspec.Struct, frozen=True, gc=False):
    """A content block as it starts."""

    type: str = ""
    text: object = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message as it starts."""

    usage: object = None


class MessageEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of Messages."""

    type: str = ""
    delta: BlockDelta | None = None
    content_block: Block | None = None
    message: Message | None = None
    usage: object = None
    error: object = None


class OtherEvent(msgspec.Struct, frozen=True, gc=False, rename={"kind": "object"}):
    """An event of an API of which nothing is known but how an error looks."""

    error: object = None
    kind: object = None
    type: object = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_response = msgspec.json.Decoder(ResponseEvent).decode
decode_message = msgspec.json.Decoder(MessageEvent).decode
decode_other = msgspec.json.Decoder(OtherEvent).decode
