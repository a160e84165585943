"""The shapes of a prompt's JSON, as much of them as is read, and a decoder for each.

What a model reads stays raw: it is cut and counted a piece at a time, never built whole. Uncompiled, as msgspec reads
annotations (`wire.shapes`).
"""

import msgspec

ABSENT = msgspec.Raw()
"""What a member is that is not there: the same object, so that most need no other look."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a chat, an item of Responses or a tool: what of it is text to the model."""

    role: msgspec.Raw = ABSENT
    name: msgspec.Raw = ABSENT
    description: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    arguments: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT
    function: msgspec.Raw = ABSENT
    parameters: msgspec.Raw = ABSENT
    input_schema: msgspec.Raw = ABSENT


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a message's content; `input` and `content` are those of Anthropic's tools."""

    type: str = ""
    text: msgspec.Raw = ABSENT
    refusal: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    name: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    content: msgspec.Raw = ABSENT


class Function(msgspec.Struct, frozen=True, gc=False):
    """What is called."""

    name: msgspec.Raw = ABSENT
    arguments: msgspec.Raw = ABSENT


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call that the model made."""

    function: Function = Function()


decode_values = msgspec.json.Decoder(msgspec.Raw).decode_lines
decode_messages = msgspec.json.Decoder(list[Message]).decode
decode_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_texts = msgspec.json.Decoder(list[str]).decode
decode_parts = msgspec.json.Decoder(list[Part]).decode
decode_tool_calls = msgspec.json.Decoder(list[ToolCall]).decode
decode_function = msgspec.json.Decoder(Function).decode
decode_text = msgspec.json.Decoder(str).decode
encode = msgspec.json.Encoder().encode
