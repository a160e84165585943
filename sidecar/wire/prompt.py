"""The prompt of a request, as the bytes it came in: what tells two requests with the same prompt to be the same.

As bytes and not as values: nothing is built, and who sends a prompt again sends it from the same library, which writes
the same bytes. How it is to be answered (temperature, length, stream) is no part of it.
"""

import msgspec

from sidecar.wire.shapes import decode_prompt


def prompt_of(body: bytes) -> bytes:
    """What the model is to read: messages, prompt or input, with the standing orders and the tools beside it.

    The whole body where none of these is there, or where it is no JSON that the fast decoder takes.
    """
    try:
        parsed = decode_prompt(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    found = [
        bytes(raw)
        for raw in (parsed.messages, parsed.prompt, parsed.input, parsed.system, parsed.instructions)
        if memoryview(raw).nbytes
    ]
    if not found:
        return body
    for raw in (parsed.tools, parsed.functions):
        if memoryview(raw).nbytes:
            found.append(bytes(raw))
    return b"\n".join(found)
