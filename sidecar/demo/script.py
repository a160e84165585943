"""What a simulated engine does: its pace, its models and the one fault it has, as values that may change while it runs.

Faults are named by what is seen on the wire, not by their cause: a proxy cannot see causes. Each is one that engines
showed in the field (an engine core that hangs behind a healthy front, a stream ended without its marker, an error
under HTTP 200). What each must come to in a proxy is `kernel/outcome`.
"""

from enum import StrEnum
from hashlib import blake2b
from math import exp
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class Kind(StrEnum):
    """What goes wrong. `after` counts tokens sent before it does; "plain" is a non-streamed answer.

    Plain answers have no tokens: where a fault strikes inside a stream, they get their head and half of their body.
    """

    STALL = "stall"  # silence, the connection stays open
    CUT_RST = "cut_rst"  # TCP reset
    CUT_FIN = "cut_fin"  # TCP close inside a chunked body (plain: short of its content-length)
    CUT_NO_TERMINATOR = "cut_no_terminator"  # a clean HTTP end, but no finish_reason and no [DONE]
    IN_BAND_ERROR = "in_band_error"  # status 200, then an error object, [DONE] and a clean end
    MALFORMED_EVENT = "malformed_event"  # one event that is not JSON amid good ones
    HEADERS_ONLY = "headers_only"  # a 200 head, then silence
    ROLE_ONLY = "role_only"  # head and the role chunk, then silence
    COMMENTS_ONLY = "comments_only"  # head, then one SSE comment each `period_s`
    SLOW = "slow"  # the right answer, every wait of it `factor` times as long
    SLOW_DRIP = "slow_drip"  # the right answer, `size` bytes each `period_s`
    EMPTY = "empty"  # 200 and a clean end with no byte of body
    WRONG_MEDIA_TYPE = "wrong_media_type"  # 200 and an HTML page
    STATUS = "status"  # an error answer: `status`, `retry_after`, `message`
    HANG = "hang"  # the request is read, nothing is ever answered
    FIN_BEFORE_HEAD = "fin_before_head"
    RST_BEFORE_HEAD = "rst_before_head"
    BAD_HTTP = "bad_http"  # bytes that are not HTTP in place of a head
    EXTRA_BYTES = "extra_bytes"  # a right answer, and bytes that nobody asked for behind it
    STALE = "stale"  # a right answer, then an unannounced close of the kept-alive connection
    DIE = "die"  # the listener closes, every connection is reset, at once and until healed


MID_STREAM = frozenset(
    {Kind.STALL, Kind.CUT_RST, Kind.CUT_FIN, Kind.CUT_NO_TERMINATOR, Kind.IN_BAND_ERROR, Kind.MALFORMED_EVENT}
)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault and where it strikes.

    `after`: tokens sent first; more than the answer has means "after the last one, before its end". `torn`: half of
    the next event precedes a stall or a cut. `share` of the requests are in question at all, by their id (`luck`): who
    sends them can tell which. Of those, `skip` are spared first; then `times` are struck, 0 for every one. `for_s`: it
    heals by itself, 0 for never. `message`, `type` and `code` fill error objects; `body`, when not empty, stands in
    their place verbatim. `retry_after` is the header's value, empty for none.
    """

    kind: Kind
    after: Count = 0
    torn: bool = False
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    skip: Count = 0
    times: Count = 0
    for_s: Seconds = 0.0
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    retry_after: str = ""
    message: str = ""
    type: str = ""
    code: int | str | None = None
    body: str = ""
    period_s: Annotated[float, msgspec.Meta(ge=0.001, le=3600.0)] = 0.05
    size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 5.0

    def strikes(self, request_id: str) -> bool:
        """Whether a request is among the `share`."""
        return self.share >= 1.0 or luck(request_id, "fault") < self.share


EngineName = Literal["vllm", "triton", "deepspeed"]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine behaves; every default answers at once and rightly.

    `engine`: whose words it speaks (vLLM's OpenAI server, Triton's generate extension, DeepSpeed-MII's OpenAI front).
    `tokens`: length of an answer whose request names none. `first_token_s` before the first token, plus
    `first_token_per_live_s` for each other request alive and `first_token_per_prompt_token_s` for each token of its
    prompt, all times a lognormal factor of sigma `spread`, which is the request's own (`luck`); `token_gap_s` between
    tokens, 0 for all of them at once.
    `event_bytes`: chat and completion events are filled up to this size, 0 for none. `any_model` False refuses
    models that are not in `models`, as a real engine does. `close_framed`: streams end with their connection, without
    chunks. `slots`: requests served at a time, 0 for no limit; the others wait, at most `queue` of them (0 for no
    limit), and one more gets 503. `healthy` False turns /health 503.
    `keep`: how many of the last requests can be looked at, 0 for none.
    """

    engine: EngineName = "vllm"
    tokens: Count = 16
    first_token_s: Seconds = 0.0
    first_token_per_live_s: Seconds = 0.0
    first_token_per_prompt_token_s: Seconds = 0.0
    spread: Annotated[float, msgspec.Meta(ge=0.0, le=5.0)] = 0.0
    token_gap_s: Seconds = 0.0
    event_bytes: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    models: tuple[str, ...] = ("demo",)
    any_model: bool = True
    close_framed: bool = False
    slots: Count = 0
    queue: Count = 0
    healthy: bool = True
    keep: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 64
    fault: Fault | None = None

    def first_token_after_s(self, request_id: str, prompt_tokens: int, others: int) -> float:
        """How long a request waits for its first token while `others` are alive."""
        wait_s = (
            self.first_token_s
            + self.first_token_per_live_s * others
            + self.first_token_per_prompt_token_s * prompt_tokens
        )
        if self.spread > 0.0:
            wait_s *= exp(self.spread * NORMAL.inv_cdf(luck(request_id, "pace")))
        return wait_s


NORMAL = NormalDist()


def luck(request_id: str, of: str) -> float:
    """A number in (0, 1) that is a request's own, the same on every engine and in every run; another one for each `of`.

    Not drawn in order of arrival: what was struck can then be told from outside, and two runs of the same requests have
    the same luck however they interleave.
    """
    digest = blake2b(f"{of}:{request_id}".encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return (int.from_bytes(digest, "big") + 0.5) / (1 << 48)
