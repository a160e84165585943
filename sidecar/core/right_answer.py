"""Whether the new model answered its canary, and answered rightly: the doctrine first, as for every answer, then more.

A client's answer is judged for what it says of the endpoint; a canary's also for what it says of the model: that it is
the one that was loaded, where the engine tells, and that it says what it was expected to.
"""

from typing import Final

import msgspec

from sidecar.core.classify import ABORTED, ending_of_error, ending_of_status
from sidecar.core.hot_update import Canary
from sidecar.kernel.change import Again, Done, Failed, Outcome
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.wire.answer import read_answer
from sidecar.wire.call import Api

MAX_SHOWN: Final = 80
"""Characters of an answer in what an operator is told: it is that of his own prompt."""


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    model: str = ""


def judged(canary: Canary, model: str, status: int, body: bytes) -> Outcome:
    """What the whole answer to a canary means: `status` (0: none came) and body as a client would get them.

    An endpoint that is full may be asked again; all else that is no right answer is Failed.
    """
    ending, said = _ending(status, body)
    result = DOCTRINE[ending].node
    if result is Result.OVERLOADED:
        return Again(f"it is full: {said}")
    if result is not Result.SUCCESS:
        return Failed(f"{ending.value}: {said}")
    try:
        answer = msgspec.json.decode(body, type=_Completion)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Failed("its answer has no text")
    text = answer.choices[0].text if answer.choices else ""
    if answer.model and answer.model != model:
        return Failed(f"wrong answer: {answer.model[:MAX_SHOWN]!r} answered, and not {model!r}")
    if canary.expect not in text:
        return Failed(f"wrong answer: {text[:MAX_SHOWN]!r} does not contain {canary.expect[:MAX_SHOWN]!r}")
    return Done(f"it answered {text[:MAX_SHOWN]!r}")


def _ending(status: int, body: bytes) -> tuple[Ending, str]:
    if status == 0:
        return Ending.RESET_BEFORE_HEAD, "no whole answer"
    answer = read_answer(Api.COMPLETIONS, body, status=status)
    said = f"{status}: {answer.error.message[:MAX_SHOWN]}" if answer.error is not None else f"{status}"
    if status >= 400:
        return ending_of_status(status, answer.error, False), said
    if answer.error is not None:
        return ending_of_error(answer.error), said
    if not body or answer.malformed:
        return Ending.EMPTY, "an answer that is none"
    return (Ending.ABORTED if answer.finish_reason == ABORTED else Ending.COMPLETE), said
