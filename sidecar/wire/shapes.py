"""The shapes of JSON that we read, as much of them as we read, and a decoder for each: requests, answers, events.

Members of what an engine sends are typed only where the shape hangs on them: a strange one must not hide its
neighbours, or an engine with odd logprobs would seem to send no token at all. What is not named here is skipped,
neither built nor judged.

Shapes have a module of their own because msgspec reads their annotations, which compiled modules do not keep.
"""

import msgspec

Index = int | float | str | None
"""A choice's index: a number, and whatever else an engine puts there, as long as it can be told from others."""


Number = int | float | str | None
"""What engines take for a number (pydantic's lax mode)."""


class Metadata(msgspec.Struct, frozen=True, gc=False):
    """The `metadata` of a Messages request."""

    user_id: msgspec.Raw = msgspec.Raw()


class CallBody(msgspec.Struct, frozen=True, gc=False):
    """A request of any API."""

    model: str | None = None
    stream: bool | int | str | None = None
    user: str | None = None
    max_tokens: Number = None
    max_completion_tokens: Number = None
    max_output_tokens: Number = None
    n: Number = None
    metadata: msgspec.Raw = msgspec.Raw()


class WholeBody(CallBody, frozen=True, gc=False):
    """The same with all of `PromptBody` and `ModalBody`: who reads these does not look through the body again."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    modalities: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()


class PromptBody(msgspec.Struct, frozen=True, gc=False):
    """What the model is to read, of a request of any API."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()


class AnswersBody(msgspec.Struct, frozen=True, gc=False):
    """What of a request tells how many answers it asks for, beside `n`."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    best_of: object = None


class ModalBody(msgspec.Struct, frozen=True, gc=False):
    """What of a request tells its modality."""

    modalities: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A message of a prompt, or an item of a Responses input."""

    type: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()


class ContentPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a message, of which the type alone is read."""

    type: msgspec.Raw = msgspec.Raw()


class AnswerChoice(msgspec.Struct, frozen=True, gc=False):
    """A choice of a whole answer."""

    finish_reason: object = None


class AnswerBody(msgspec.Struct, frozen=True, gc=False, rename={"kind": "object"}):
    """A whole answer of any API, or an error."""

    error: object = None
    kind: object = None
    type: object = None
    detail: object = None
    message: object = None
    code: object = None
    choices: list[AnswerChoice] | None = None
    output: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    usage: object = None
    status: object = None
    stop_reason: object = None
    incomplete_details: object = None


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
    """An event of an API of which nothing is known but how an error looks, and what tells its usage.

    `meta_info` is SGLang's: with the usage's words in it.
    """

    error: object = None
    kind: object = None
    type: object = None
    usage: object = None
    meta_info: object = None


decode_call = msgspec.json.Decoder(WholeBody).decode
decode_prompt = msgspec.json.Decoder(PromptBody).decode
decode_answers = msgspec.json.Decoder(AnswersBody).decode
decode_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_text = msgspec.json.Decoder(str).decode
decode_metadata = msgspec.json.Decoder(Metadata).decode
decode_modal = msgspec.json.Decoder(ModalBody).decode
decode_modalities = msgspec.json.Decoder(list[object]).decode
decode_turns = msgspec.json.Decoder(list[Turn]).decode
decode_parts = msgspec.json.Decoder(list[ContentPart]).decode
decode_answer = msgspec.json.Decoder(AnswerBody).decode
decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_response = msgspec.json.Decoder(ResponseEvent).decode
decode_message = msgspec.json.Decoder(MessageEvent).decode
decode_other = msgspec.json.Decoder(OtherEvent).decode
