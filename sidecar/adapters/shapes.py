"""The shapes of JSON that foreign engines send, as much of them as their dialects read, and a decoder for each.

As `wire.shapes`: members are typed only where the shape hangs on them, and they stand apart because compiled modules do
not keep annotations.
"""

import msgspec

# Triton


class TritonEvent(msgspec.Struct, frozen=True, gc=False):
    """A response of `generate` or `generate_stream`: each output tensor a member, a scalar or a list of one."""

    text_output: msgspec.Raw = msgspec.Raw()
    error: object = None
    finish_reason: object = None
    num_input_tokens: object = None
    num_output_tokens: object = None


decode_triton_event = msgspec.json.Decoder(TritonEvent).decode
decode_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode


# DeepSpeed-MII


class MiiSaid(msgspec.Struct, frozen=True, gc=False):
    """A chat's message, or what a chunk adds to it. A text that is none is unreadable."""

    content: str | None = None


class MiiChoice(msgspec.Struct, frozen=True, gc=False):
    """A choice of the OpenAI front, whole or of a chunk."""

    delta: MiiSaid | None = None
    message: MiiSaid | None = None
    text: str | None = None
    finish_reason: str | None = None


class MiiUsage(msgspec.Struct, frozen=True, gc=False):
    """Tokens as the OpenAI front counts them."""

    prompt_tokens: int = -1
    completion_tokens: int = -1


class MiiChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk or a whole answer of the OpenAI front."""

    choices: list[MiiChoice] | None = None
    usage: MiiUsage | None = None


class MiiText(msgspec.Struct, frozen=True, gc=False):
    """An event or a whole answer of api_server: a text per prompt."""

    text: list[str] | None = None


class MiiReply(msgspec.Struct, frozen=True, gc=False):
    """What the gateway answers to one prompt."""

    generated_text: str
    finish_reason: str
    prompt_length: int = -1
    generated_length: int = -1


decode_mii_chunk = msgspec.json.Decoder(MiiChunk).decode
decode_mii_texts = msgspec.json.Decoder(MiiText).decode
decode_mii_replies = msgspec.json.Decoder(list[MiiReply]).decode
