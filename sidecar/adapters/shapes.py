"""The shapes of JSON that foreign engines send, as much of them as their dialects read, and a decoder for each.

As `wire.shapes`: members are typed only where the shape hangs on them, and they stand apart because compiled modules do
not keep annotations.
"""

import msgspec

# Triton


class TritonEvent(msgspec.Struct, frozen=True, gc=False):
    """One response of `generate` or `generate_stream`: each output tensor a member, a scalar or a list of one."""

    text_output: msgspec.Raw = msgspec.Raw()
    error: object = None
    finish_reason: object = None
    num_input_tokens: object = None
    num_output_tokens: object = None


class TritonModel(msgspec.Struct, frozen=True, gc=False):
    """One version in the repository's index; what is not loaded has neither version nor state."""

    name: str = ""
    version: str | int = ""
    state: str = ""


decode_triton_event = msgspec.json.Decoder(TritonEvent).decode
decode_triton_index = msgspec.json.Decoder(list[TritonModel]).decode
decode_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode
