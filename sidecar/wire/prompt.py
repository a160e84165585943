"""The prompt of a request, as the bytes it came in: what tells two requests with the same prompt to be the same.
And how many prompts it is: completions take a list of them, and each has an answer of its own.

As bytes and not as values: nothing is built, and who sends a prompt again sends it from the same library, which writes
the same bytes. How it is to be answered (temperature, length, stream) is no part of it.
"""

from typing import Final

import msgspec

from sidecar.wire.lenient import read_as
from sidecar.wire.shapes import AnswersBody, PromptBody, WholeBody, decode_answers, decode_prompt, decode_raws

MOST_COUNTED: Final = 4096
"""Prompts in a list that are counted one by one; of more, the marks that they begin with: millions fit into a body."""


def prompt_of(body: bytes, whole: WholeBody | None = None) -> bytes:
    """What the model is to read: messages, prompt or input, with the standing orders and the tools beside it.

    The whole body where none of these is there, or where it is no JSON that the fast decoder takes. `whole`: the same
    body, where it is decoded already (`Call.whole`).
    """
    parsed: PromptBody | WholeBody
    if whole is not None:
        parsed = whole
    else:
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


def answers_of(body: bytes, n: int) -> int:
    """How many answers a body asks for, `n` for each of its prompts: more than `n` where there is a list of prompts (of
    texts, of token ids, of conversations) or where an engine is to choose the best of more. At least `n`."""
    try:
        parsed = decode_answers(body)
    except msgspec.DecodeError:
        try:
            parsed = read_as(body, AnswersBody)
        except (ValueError, RecursionError):
            return n
    except RecursionError:
        return n
    best_of = parsed.best_of
    each = best_of if isinstance(best_of, int) and not isinstance(best_of, bool) and best_of > n else n
    return each * max(1, _count(parsed.prompt, b'"['), _count(parsed.messages, b"["))


def _count(raw: msgspec.Raw, marks: bytes) -> int:
    """The members of a list that begins with one of these marks; 1 of all else."""
    text = bytes(raw)
    begin = text[1:].lstrip()[:1] if text.startswith(b"[") else b""
    if not begin or begin not in marks:
        return 1
    count = text.count(begin) - 1 if begin == b"[" else text.count(begin) // 2
    if count > MOST_COUNTED:
        return count
    try:
        return len(decode_raws(text))
    except (msgspec.DecodeError, RecursionError):
        return count
