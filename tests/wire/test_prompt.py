"""Which bytes of a body are its prompt."""

import pytest

from sidecar.kernel.errors import SidecarError
from sidecar.wire.call import Api, read_call
from sidecar.wire.prompt import MOST_COUNTED, answers_of, prompt_of

MESSAGES = b'[{"role":"user","content":"hi, \\"you\\""}]'


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"model":"m","messages":%b,"temperature":0.1}' % MESSAGES, MESSAGES),
        (b'{"stream":true, "messages": %b ,"n":2}' % MESSAGES, MESSAGES),
        (b'{"model":"m","prompt":"hello"}', b'"hello"'),
        (b'{"prompt":[1,2,3]}', b"[1,2,3]"),
        (b'{"input":"text","instructions":"be brief"}', b'"text"\n"be brief"'),
        (b'{"system":"be brief","messages":[]}', b'[]\n"be brief"'),
        (b'{"tools":[{"name":"f"}],"prompt":"p"}', b'"p"\n[{"name":"f"}]'),
        (b'{"tools":[],"query":"q"}', b'{"tools":[],"query":"q"}'),
        (b'{"prompt":null}', b"null"),
        (b'{"model":"m","query":"q","documents":["d"]}', b'{"model":"m","query":"q","documents":["d"]}'),
        (b"{}", b"{}"),
        (b'{"messages":[NaN]}', b'{"messages":[NaN]}'),
        (b"not JSON", b"not JSON"),
        (b'{"messages":' + b"[" * 100_000 + b"}", b'{"messages":' + b"[" * 100_000 + b"}"),
    ],
)
def test_prompt_is_what_the_model_reads_as_it_was_written(body: bytes, prompt: bytes) -> None:
    assert prompt_of(body) == prompt
    try:
        whole = read_call(Api.CHAT, body).whole
    except SidecarError:
        return
    assert prompt_of(body, whole) == prompt


def test_prompt_does_not_keep_its_body() -> None:
    assert type(prompt_of(b'{"prompt":"hello"}')) is bytes


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        (b'{"prompt":"a"}', 2),
        (b'{"prompt":["a"]}', 2),
        (b'{"prompt": [ "a" , "b\\"x" ]}', 4),
        (b'{"prompt":[1,2,3]}', 2),
        (b'{"prompt":[]}', 2),
        (b'{"prompt":[[1],[2],[3]]}', 6),
        (b'{"prompt":"a","best_of":5}', 5),
        (b'{"prompt":"a","best_of":1}', 2),
        (b'{"prompt":"a","best_of":true}', 2),
        (b'{"messages":[{"role":"user"},{"role":"user"}]}', 2),
        (b'{"messages":[[{"role":"user"}],[{"content":"[x]"}]]}', 4),
        (b'{"prompt":["a","b"],"top_p":NaN}', 4),
        (b"not JSON", 2),
        (b'{"prompt":' + b"[" * 100_000 + b"}", 2),
        (b'{"prompt":[%b]}' % b",".join([b'"a"'] * (MOST_COUNTED + 1)), 2 * (MOST_COUNTED + 1)),
        (b'{"prompt":[%b]}' % b",".join([b"[1]"] * (MOST_COUNTED + 1)), 2 * (MOST_COUNTED + 1)),
    ],
)
def test_every_prompt_of_a_list_has_its_answers(body: bytes, answers: int) -> None:
    assert answers_of(body, 2) == answers
