"""Chat templates: the prompts that transformers makes, to the letter, and templates that nobody should trust."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.ask import MOST_VALUES
from sidecar.adapters.template import FILES, MAX_PROMPT, MAX_TEMPLATE, ChatTemplate, template_of
from sidecar.kernel.errors import Reason, SidecarError

TEMPLATES = Path(__file__).parent / "chat_templates"
PROMPTS: dict[str, Any] = json.loads((TEMPLATES / "prompts.json").read_text(encoding="utf-8"))
NOON = datetime(2026, 11, 30, 12, 0).timestamp()
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def template(source: str, tokens: dict[str, str] | None = None, *, adds_bos: bool = False) -> ChatTemplate:
    return ChatTemplate(source, tokens, adds_bos=adds_bos, clock=lambda: NOON)


def refusal(source: str, messages: list[dict[str, Any]] | None = None) -> SidecarError:
    made = template(source)
    with pytest.raises(SidecarError) as refused:
        made.render(CHAT if messages is None else messages)
    return refused.value


# --- what transformers makes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PROMPTS["prompts"], ids=lambda case: f"{case['template']}-{case['chat']}")
def test_prompts_are_those_of_transformers(case: dict[str, Any]) -> None:
    source = (TEMPLATES / f"{case['template']}.jinja").read_text(encoding="utf-8")
    made = template(source, PROMPTS["tokens"])
    if "error" in case:
        with pytest.raises(SidecarError) as refused:
            made.render(case["messages"])
        assert refused.value.reason is Reason.BAD_REQUEST
        assert refused.value.detail == case["error"]
    else:
        assert made.render(case["messages"]) == case["prompt"]


def test_every_template_here_has_prompts() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {case["template"] for case in PROMPTS["prompts"]}


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "x"]), st.text()), min_size=1, max_size=5))
def test_no_message_is_lost_or_read_as_a_template(turns: list[tuple[str, str]]) -> None:
    made = template("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}>")
    prompt = made.render([{"role": role, "content": content} for role, content in turns])
    assert prompt == "".join(f"{role}:{content}\n" for role, content in turns) + ">"


def test_rendering_leaves_the_messages_as_they_were_and_the_template_ready() -> None:
    made = template(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    messages = [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    before = json.dumps(messages)
    assert [made.render(messages), made.render(messages)] == ["1", "1"]
    assert json.dumps(messages) == before


def test_template_tells_the_day_by_the_clock_it_was_given() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(CHAT) == "30 Nov 2026"


def test_template_asks_for_the_answer_and_has_no_tools_or_documents() -> None:
    made = template("{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }} {{ date is defined }}")
    assert made.render(CHAT) == "True True True False"


ARGUMENTS = [
    pytest.param('{"at": "Köln"}', '{"at": "Köln"}', id="text that is JSON"),
    pytest.param("", "{}", id="empty"),
    pytest.param("{broken", '"{broken"', id="text that is not"),
    pytest.param({"at": 1}, '{"at": 1}', id="no text"),
    pytest.param("[" * 20_000, json.dumps("[" * 20_000), id="too deep"),
]


@pytest.mark.parametrize(("arguments", "shown"), ARGUMENTS)
def test_arguments_of_tool_calls_are_what_they_say(arguments: object, shown: str) -> None:
    made = template("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    assert made.render([{"role": "assistant", "content": "", "tool_calls": calls}]) == shown


def test_arguments_without_end_are_not_read() -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps([[]] * 1000)}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    error = refusal("", [message] * (MOST_VALUES // 1000))
    assert (error.reason, error.detail) == (
        Reason.BAD_REQUEST,
        f"the arguments of tool calls have more than {MOST_VALUES} values",
    )
    assert template("x").render([message] * (MOST_VALUES // 2001)) == "x"


@pytest.mark.parametrize("calls", [None, "x", 5, [None], ["x"], [{}], [{"function": None}], [{"function": {}}]])
def test_odd_tool_calls_are_the_templates_business(calls: object) -> None:
    made = template("{{ messages[0].tool_calls | tojson }}")
    assert json.loads(made.render([{"role": "assistant", "content": "", "tool_calls": calls}])) == calls


# --- refusals ---------------------------------------------------------------------------------------------------------

NO_ROLE: list[dict[str, Any]] = [{}, {"content": "x"}, {"role": None}, {"role": 5}, {"role": ["user"]}]


@pytest.mark.parametrize("message", NO_ROLE)
def test_message_without_a_role_is_named(message: dict[str, Any]) -> None:
    error = refusal("{{ messages[0].role }}", [*CHAT, message])
    assert (error.reason, error.origin) == (Reason.BAD_REQUEST, "downstream")
    assert error.detail == "messages[1].role is missing"


def test_what_a_template_raises_is_told_as_it_says_it() -> None:
    error = refusal("{{ raise_exception('only user: ' ~ messages[0].role) }}")
    assert (error.reason, error.origin, error.retryable) == (Reason.BAD_REQUEST, "downstream", False)
    assert error.detail == "only user: user"


def test_what_a_template_raises_is_not_as_long_as_a_client_likes() -> None:
    assert len(refusal("{{ raise_exception('x' * 100000) }}").detail) == 1000


CANNOT = [
    pytest.param("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'", id="undefined"),
    pytest.param("{{ messages[7]['content'] }}", "has no element 7", id="element"),
    pytest.param("{{ 1 + messages[0].content }}", "unsupported operand", id="type"),
    pytest.param("{{ 1 / 0 }}", "division", id="zero"),
    pytest.param("{{ nothing() }}", "'nothing' is undefined", id="call"),
    pytest.param("{{ nothing | tojson }}", "not JSON serializable", id="json"),
    pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion", id="recursion"),
    pytest.param("{% for i in range(100001) %}{% endfor %}", "MAX_RANGE", id="range"),
    pytest.param("{% include 'x' %}", "no loader", id="include"),
    pytest.param("{{ strftime_now(5) }}", "must be str", id="date"),
]


@pytest.mark.parametrize(("source", "why"), CANNOT)
def test_template_that_cannot_use_the_messages_says_why(source: str, why: str) -> None:
    error = refusal(source)
    assert error.reason is Reason.BAD_REQUEST
    assert error.detail.startswith("the model's chat template cannot use these messages: ")
    assert why in error.detail


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ strftime_now.__closure__[0] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': messages}) }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0].pop('role') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_lets_nothing_out_and_nothing_be_changed(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    made = template(source)
    with pytest.raises(SidecarError) as refused:
        made.render(messages)
    assert messages == CHAT
    assert (refused.value.reason, refused.value.origin) == (Reason.UNSUPPORTED, "local")


def test_set_on_what_is_no_namespace_is_refused() -> None:
    assert refusal("{% set m = messages[0] %}{% set m.role = 'x' %}").reason is Reason.BAD_REQUEST


def test_hidden_attributes_read_as_nothing() -> None:
    assert (
        template(
            "<{{ ''.__class__ }}{{ raise_exception.__globals__ }}{{ (''|attr('__class__'))|attr('__mro__') }}>"
        ).render(CHAT)
        == "<>"
    )


def test_prompt_is_bounded_while_it_is_made() -> None:
    source = "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}"
    error = refusal(source, [{"role": "user", "content": "x" * (MAX_PROMPT // 1000)}])
    assert (error.reason, error.detail) == (Reason.BAD_REQUEST, f"the prompt exceeds {MAX_PROMPT} characters")


# --- what is no template ----------------------------------------------------------------------------------------------

BROKEN = [
    pytest.param("a\n{% for m in messages %}\n", "line 2: ", id="unclosed"),
    pytest.param("\n\n{{ messages | nothing }}", "line 3: No filter named 'nothing'", id="filter"),
    pytest.param("{{ 1 +* 2 }}", "line 1: ", id="syntax"),
    pytest.param("{% generation %}", "line 1: ", id="generation"),
    pytest.param("{% for i in x %}" * 60 + "{% endfor %}" * 60, "cannot be compiled: ", id="too deep"),
    pytest.param("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be compiled: ", id="recursion"),
    pytest.param("x" * (MAX_TEMPLATE + 1), f"is longer than {MAX_TEMPLATE} characters", id="too long"),
]


@pytest.mark.parametrize(("source", "why"), BROKEN)
def test_what_is_no_template_is_refused_with_its_line(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^") as refused:
        template(source)
    assert str(refused.value).startswith(why)


# --- the token that begins a text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "adds_bos", "prompt"),
    [
        ("{{ bos_token }}hi", True, "hi"),
        ("{{ bos_token }}hi", False, "<s>hi"),
        ("hi", True, "hi"),
        ("{{ bos_token }}{{ bos_token }}hi", True, "<s>hi"),
        ("hi{{ bos_token }}", True, "hi<s>"),
    ],
)
def test_begin_of_text_is_written_once(source: str, adds_bos: bool, prompt: str) -> None:
    assert template(source, {"bos_token": "<s>"}, adds_bos=adds_bos).render(CHAT) == prompt


# --- model folders ----------------------------------------------------------------------------------------------------

SHOWN = "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}|{{ messages[0].content }}"


def folder(**files: object) -> dict[str, bytes]:
    named = {f"{name}.jinja" if name == "chat_template" else f"{name}.json": data for name, data in files.items()}
    return {name: data if isinstance(data, bytes) else json.dumps(data).encode() for name, data in named.items()}


def prompt_of(files: dict[str, bytes]) -> str:
    assert set(files) <= set(FILES)
    return template_of(files, clock=lambda: NOON).render(CHAT)


PATTERN = {"single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
PLAIN = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
BYTES = {"type": "ByteLevel", "add_prefix_space": True}
TWO = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": None}

FOLDERS = [
    pytest.param(folder(chat_template=b"{{ bos_token }}hi"), "hi", id="a template alone"),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config={**TWO, "chat_template": "old"}),
        "<s>|</s>|False|hi",
        id="the file before the configuration",
    ),
    pytest.param(folder(tokenizer_config={**TWO, "chat_template": SHOWN}), "<s>|</s>|False|hi", id="configuration"),
    pytest.param(
        folder(
            tokenizer_config={"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "d"}]}
        ),
        "d",
        id="the default of several",
    ),
    pytest.param(
        {"chat_template.json": b'{"chat_template": "p"}', "tokenizer_config.json": b'{"chat_template": "c"}'},
        "p",
        id="a processor's",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), special_tokens_map=TWO), "<s>|</s>|False|hi", id="tokens from the map"
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config={"bos_token": "a"}, special_tokens_map=TWO),
        "a||False|hi",
        id="tokens from the configuration",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config={**TWO, "add_bos_token": True}),
        "|</s>|False|hi",
        id="the configuration says that it begins a text",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config=TWO, tokenizer={"post_processor": PATTERN}),
        "|</s>|False|hi",
        id="the tokenizer begins a text",
    ),
    pytest.param(
        folder(
            chat_template=SHOWN.encode(),
            tokenizer_config=TWO,
            tokenizer={"post_processor": {"type": "Sequence", "processors": [BYTES, PATTERN]}},
        ),
        "|</s>|False|hi",
        id="the tokenizer begins a text, as one of several",
    ),
    pytest.param(
        folder(
            chat_template=SHOWN.encode(),
            tokenizer_config={**TWO, "add_bos_token": False},
            tokenizer={"post_processor": PATTERN},
        ),
        "<s>|</s>|False|hi",
        id="the configuration before the tokenizer",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config=TWO, tokenizer={"post_processor": PLAIN}),
        "<s>|</s>|False|hi",
        id="the tokenizer begins nothing",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config=TWO, tokenizer={"post_processor": BYTES, "model": {}}),
        "<s>|</s>|False|hi",
        id="another processor",
    ),
    pytest.param(
        folder(chat_template=SHOWN.encode(), tokenizer_config=TWO, tokenizer={"post_processor": None}),
        "<s>|</s>|False|hi",
        id="no processor",
    ),
]


@pytest.mark.parametrize(("files", "prompt"), FOLDERS)
def test_model_folder_is_read_as_transformers_does(files: dict[str, bytes], prompt: str) -> None:
    assert prompt_of(files) == prompt


BAD_FOLDERS = [
    pytest.param({}, "there is no chat template: ", id="nothing"),
    pytest.param(folder(tokenizer_config=TWO), "there is no chat template: ", id="none in the configuration"),
    pytest.param(folder(chat_template=b"\xff"), "chat_template.jinja: is not UTF-8: ", id="no text"),
    pytest.param(folder(chat_template=b"\n{% if %}"), "chat_template.jinja: line 2: ", id="no template"),
    pytest.param(folder(tokenizer_config={"chat_template": "{{"}), "tokenizer_config.json: line 1: ", id="neither"),
    pytest.param(folder(chat_template=b"x", tokenizer_config=b"{"), "tokenizer_config.json: ", id="no JSON"),
    pytest.param(
        folder(chat_template=b"x", tokenizer_config=b'{"x":' * 100_000), "tokenizer_config.json: ", id="too deep"
    ),
    pytest.param(folder(chat_template=b"x", tokenizer_config=b'"\xff"'), "tokenizer_config.json: ", id="no UTF-8"),
    pytest.param(folder(chat_template=b"x", tokenizer_config={"bos_token": 5}), "tokenizer_config.json: ", id="type"),
    pytest.param(
        folder(chat_template=b"x", tokenizer_config=TWO, tokenizer=b"[]"), "tokenizer.json: ", id="no tokenizer"
    ),
    pytest.param(
        folder(tokenizer_config={"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}),
        'tokenizer_config.json: none of its chat templates is named "default": a, b',
        id="no default",
    ),
]


@pytest.mark.parametrize(("files", "why"), BAD_FOLDERS)
def test_bad_model_folder_is_refused_with_the_file_at_fault(files: dict[str, bytes], why: str) -> None:
    with pytest.raises(ValueError, match=r"^") as refused:
        prompt_of(files)
    assert str(refused.value).startswith(why)
