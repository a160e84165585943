"""What a user of OpenAI's Python client does, one step after another: the same against every engine.

The engine is behind a sidecar, and the client is the official one, as it comes: what it accepts, types and raises is
what users see. No step knows which engine answers; the little that no translation can hide stands in `Served`.

1. Answers are greedy and of a length that is asked for (`min_tokens`), so that a stream is compared with the whole.
2. A refusal has to arrive as the client's own exception of the right kind, never as an answer that ends well.
3. A step leaves nothing behind: what it breaks off, it closes.

Also by hand, against any sidecar: `python -m tests.engines.script http://127.0.0.1:9400 MODEL`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
UNICODE = "Grüße, 你好, שלום, 🎉👩‍👩‍👧: é"
TOKENS = 12
AT_ONCE = 8
TIMEOUT_S = 60.0
LEAVE_S = 1.0
KNOWN_S = 4.0  # a sidecar that asks engines for their models every second
LONG = {"max_tokens": 1000, "extra_body": {"min_tokens": 1000}}  # seconds of any engine here


@dataclass(frozen=True)
class Served:
    """Where the step asks, and what it may know: the model's name and how many tokens its context holds.

    `lacks`: words of the name by which the engine is called where it cannot do what it is asked; empty: it can do all.
    `tells_length`: it says of a prompt that is too long that this is what is wrong; others fail without a word.
    `recounts`: it counts a whole answer's tokens by reading its text anew, which may make other tokens of it.
    `streams`: its answers come token by token; else in one piece at the end, however long that takes.
    `held`: how many requests the engine itself says that it holds, asked before anything is broken off.
    """

    address: str
    model: str
    context: int = 8192
    lacks: str = ""
    tells_length: bool = True
    recounts: bool = False
    streams: bool = True
    held: Callable[[], float] = field(default=lambda: 1)

    def client(self, **options: Any) -> Any:
        """OpenAI's client, set to send each request once."""
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, **({"timeout": TIMEOUT_S} | options)
        )


@dataclass(frozen=True)
class Told:
    """A whole answer, or a stream put together."""

    text: str
    finish_reason: str
    usage: Any


def chat(client: Any, served: Served, **asked: Any) -> Told:
    """A chat's whole answer; its shape is checked."""
    answer = client.chat.completions.create(model=served.model, messages=MESSAGES, **_asked(asked))
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, choice.index) == ("chat.completion", served.model, 0)
    assert (choice.message.role, choice.message.tool_calls or None) == ("assistant", None)
    return Told(choice.message.content, choice.finish_reason, answer.usage)


def chat_streamed(client: Any, served: Served, **asked: Any) -> Told:
    """A chat's stream; that it says who speaks, and ends, exactly once."""
    with client.chat.completions.create(model=served.model, messages=MESSAGES, stream=True, **_asked(asked)) as stream:
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert choices[0].delta.role == "assistant"
    return _told(chunks, [choice.delta.content or "" for choice in choices], served)


def completion(client: Any, served: Served, **asked: Any) -> Told:
    """A completion's whole answer."""
    answer = client.completions.create(model=served.model, **({"prompt": PROMPT} | _asked(asked)))
    (choice,) = answer.choices
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model, choice.index) == ("text_completion", served.model, 0)
    return Told(choice.text, choice.finish_reason, answer.usage)


def completion_streamed(client: Any, served: Served, **asked: Any) -> Told:
    """A completion's stream."""
    with client.completions.create(model=served.model, stream=True, **({"prompt": PROMPT} | _asked(asked))) as stream:
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    return _told(chunks, [chunk.choices[0].text for chunk in chunks if chunk.choices], served)


ASKS = (chat, chat_streamed, completion, completion_streamed)


# --- answers


def chat_is_the_same_streamed_and_whole(client: Any, served: Served) -> None:
    whole, streamed = chat(client, served), chat_streamed(client, served)
    assert whole.text
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert streamed.usage is None


def completion_is_the_same_streamed_and_whole(client: Any, served: Served) -> None:
    whole, streamed = completion(client, served), completion_streamed(client, served)
    assert whole.text
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason) == (whole.text, "length")
    assert streamed.usage is None


def usage_is_told(client: Any, served: Served) -> None:
    for ask in ASKS:
        options = {"stream_options": {"include_usage": True}} if ask in (chat_streamed, completion_streamed) else {}
        usage = ask(client, served, **options).usage
        counted_right(usage.completion_tokens, TOKENS, served)
        assert usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def completion_has_sixteen_tokens_unless_told(client: Any, served: Served) -> None:
    told = completion(client, served, max_tokens=None, extra_body={"min_tokens": 16})
    assert told.finish_reason == "length"
    counted_right(told.usage.completion_tokens, 16, served)


def stop_string_ends_the_answer_and_is_not_said(client: Any, served: Served) -> None:
    for ask in ASKS:
        text = ask(client, served).text
        middle = len(text) // 2
        stop = next(text[at : at + 2] for at in range(middle, len(text) - 1) if text[at : at + 2].isalnum())
        told = ask(client, served, stop=stop, extra_body={})
        assert (told.text, told.finish_reason) == (text[: text.index(stop)], "stop"), (ask, stop, text)


def unicode_goes_in_and_out(client: Any, served: Served) -> None:
    said = {"role": "user", "content": UNICODE}
    whole = client.chat.completions.create(model=served.model, messages=[said], **_asked({}))
    with client.chat.completions.create(model=served.model, messages=[said], stream=True, **_asked({})) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    text.encode()  # no half of a surrogate pair
    assert whole.usage.prompt_tokens > 10
    assert completion(client, served, prompt=UNICODE).text == completion_streamed(client, served, prompt=UNICODE).text


def system_and_earlier_turns_count(client: Any, served: Served) -> None:
    turns = [
        {"role": "system", "content": "You are terse."},
        *MESSAGES,
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": [{"type": "text", "text": "And of"}, {"type": "text", "text": "Spain?"}]},
    ]
    long = client.chat.completions.create(model=served.model, messages=turns, **_asked({})).usage
    assert long.prompt_tokens > chat(client, served).usage.prompt_tokens


def long_prompt_is_answered(client: Any, served: Served) -> None:
    told = completion(client, served, prompt="one two three four " * 300, max_tokens=4, extra_body={"min_tokens": 4})
    assert told.usage.prompt_tokens > 1000
    counted_right(told.usage.completion_tokens, 4, served)


def request_id_is_the_clients(client: Any, served: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=served.model, messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}, **_asked({})
    )
    assert raw.parse().id == "chatcmpl-mine-1"


def models_are_listed(client: Any, served: Served) -> None:
    give_up = time.monotonic() + KNOWN_S
    while served.model not in [model.id for model in client.models.list().data]:
        assert time.monotonic() < give_up, client.models.list()
        time.sleep(0.1)
    models = client.models.list()
    assert {model.object for model in models.data} == {"model"}


def many_at_once_are_each_whole(client: Any, served: Served) -> None:
    with ThreadPoolExecutor(AT_ONCE) as clients:
        asks = [clients.submit(ASKS[n % len(ASKS)], client, served) for n in range(2 * AT_ONCE)]
    assert all(ask.result().text for ask in asks)


# --- refusals


def unknown_model_is_not_found(client: Any, served: Served) -> None:
    nobody = Served(served.address, "nobody")
    for ask in ASKS:
        with refused(openai.NotFoundError, ask) as error:
            ask(client, nobody)
        assert "model" in error[0].message


def bad_value_is_a_bad_request(client: Any, served: Served) -> None:
    for ask in ASKS:
        for name, value in (("temperature", -1), ("top_p", 7), ("max_tokens", -5)):
            with refused(openai.BadRequestError, ask, name) as error:
                ask(client, served, **{name: value})
            assert name in error[0].message, error[0].message


def body_that_says_nothing_is_a_bad_request(client: Any, served: Served) -> None:
    for path, body in (
        ("/chat/completions", {}),
        ("/chat/completions", {"messages": 7}),
        ("/completions", {"prompt": {}}),
    ):
        with refused(openai.BadRequestError, body):
            client.post(path, cast_to=object, body={"model": served.model, **body})


def too_long_a_prompt_is_a_bad_request(client: Any, served: Served) -> None:
    prompt = "one two three four " * (served.context // 3)
    for ask in (completion, completion_streamed):
        if served.tells_length:
            with refused(openai.BadRequestError, ask):
                ask(client, served, prompt=prompt)
        else:
            with refused(openai.APIError, ask):
                ask(client, served, prompt=prompt)


def what_the_engine_cannot_do_is_refused_by_its_name(client: Any, served: Served) -> None:
    if not served.lacks:
        answer = client.chat.completions.create(
            model=served.model, messages=MESSAGES, n=2, **_asked({"temperature": 1})
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for name, value in (("n", 2), ("tools", [tool]), ("logprobs", True), ("response_format", schema)):
        for ask in (chat, chat_streamed):
            with refused(openai.BadRequestError, ask, name) as error:
                ask(client, served, **{name: value})
            assert served.lacks in error[0].message, error[0].message
            assert (error[0].code, error[0].param) == ("unsupported", name)


# --- leaving


def leaving_a_stream_frees_the_engine(client: Any, served: Served) -> None:
    if not served.streams:
        return leaving_before_the_answer_frees_the_engine(client, served)
    with client.completions.create(model=served.model, prompt=PROMPT, stream=True, **_asked(LONG)) as stream:
        for _ in zip(range(5), stream, strict=False):
            pass
        assert served.held() == 1
    return None


def leaving_before_the_answer_frees_the_engine(client: Any, served: Served) -> None:
    hasty = client.with_options(timeout=LEAVE_S)
    with refused(openai.APITimeoutError, "leave"):
        completion(hasty, served, **LONG)


Step = Callable[[Any, Served], None]

STEPS: tuple[Step, ...] = (
    chat_is_the_same_streamed_and_whole,
    completion_is_the_same_streamed_and_whole,
    usage_is_told,
    completion_has_sixteen_tokens_unless_told,
    stop_string_ends_the_answer_and_is_not_said,
    unicode_goes_in_and_out,
    system_and_earlier_turns_count,
    long_prompt_is_answered,
    request_id_is_the_clients,
    models_are_listed,
    many_at_once_are_each_whole,
    unknown_model_is_not_found,
    bad_value_is_a_bad_request,
    body_that_says_nothing_is_a_bad_request,
    too_long_a_prompt_is_a_bad_request,
    what_the_engine_cannot_do_is_refused_by_its_name,
    leaving_a_stream_frees_the_engine,
    leaving_before_the_answer_frees_the_engine,
)


def counted_right(counted: int, tokens: int, served: Served) -> None:
    """That so many tokens were counted, or about as many where the engine only guesses."""
    assert abs(counted - tokens) <= (tokens // 4 if served.recounts else 0), (counted, tokens)


@contextmanager
def refused(kind: type[BaseException], *what: object) -> Iterator[list[Any]]:
    """That the block ends with exactly this exception of the client's; it is in the list afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except openai.OpenAIError as error:
        assert isinstance(error, kind), f"{what}: {error!r}"
        caught.append(error)
    assert caught, f"{what}: it was answered"


def _asked(asked: dict[str, Any]) -> dict[str, Any]:
    wishes = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"min_tokens": TOKENS}} | asked
    return {name: value for name, value in wishes.items() if value is not None}


def _told(chunks: list[Any], texts: list[str], served: Served) -> Told:
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {served.model}
    reasons = [reason for chunk in chunks for choice in chunk.choices if (reason := choice.finish_reason)]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(reasons) == 1, f"it ended {len(reasons)} times"
    assert len(usages) <= 1
    return Told("".join(texts), reasons[0], usages[0] if usages else None)


def main(address: str, model: str) -> None:
    """Every step in order, with its seconds; the first that fails ends it."""
    served = Served(address.removeprefix("http://"), model)
    with served.client() as client:
        for step in STEPS:
            started = time.monotonic()
            step(client, served)
            print(f"{time.monotonic() - started:6.2f} s  {step.__name__.replace('_', ' ')}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
