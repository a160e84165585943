"""Which class a request is of, and what a class promises: the policy's `qos_policies`, made ready for the request path.

1. What names a class (`identity.class`) decides, if there is one of that name. A name that no class has names nothing:
   it may be meant for a sidecar with a newer policy, and a request is not refused for it.
2. Else the first class in file order that has a match which fits, all of it. File order and not priority: whoever
   writes the file sees what comes first, and the narrow match may be that of the humble class. A header or a claim that
   is absent or empty fits nothing; a model or a tenant that is not named fits `*`. A claim is found as in `identify`:
   by its whole name, else as a way through objects; of one that is a list any item may fit (`groups`).
3. Else the class `default`, the policy's or ours.

What is matched comes from clients, so its cost is bounded: a glob that is more than a word or a beginning is held
against texts of up to `MAX_TEXT` characters, and longer ones fit none but `*`; of a claim's list the first `MAX_ITEMS`
count. (Python's patterns for globs do not backtrack from star to star, yet each star may search the whole text.)

The modality of a request is a guess by what it asks for, since no API says it; whoever knows better names the class. It
is made only where a match asks for one, since it reads the body: half a millisecond for a megabyte, which is less than
a search for the words in question takes. A megabyte of empty messages takes 80 ms, so bodies beyond `MAX_BODY` and
those of more than `MAX_OBJECTS` are judged by path and model alone.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from math import inf
from typing import Final

import msgspec

from sidecar.policy.schema import DEFAULT_CLASS, QosMatch, QosPolicy
from sidecar.wire.headers import Line
from sidecar.wire.shapes import (
    ModalBody,
    WholeBody,
    decode_modal,
    decode_modalities,
    decode_parts,
    decode_text,
    decode_turns,
)

MAX_TEXT: Final = 1024  # a thousand names of models fit; 64 KiB against a glob of 256 characters are 20 ms
MAX_ITEMS: Final = 64  # of a claim such as `groups`
MAX_BODY: Final = 8 << 20  # minutes of sound, as base64
MAX_OBJECTS: Final = 20_000  # 5 ms
MAX_MODALITIES: Final = 1024  # bytes; there are three
MAX_WORD: Final = 64  # bytes, with its quotes

VOICE_PATHS: Final = (b"/v1/audio/", b"/v1/realtime/")
VOICE_PATH: Final = b"/v1/realtime"
COMPLETIONS: Final = b"/v1/completions"

_BRACKET: Final = ord("[")
_QUOTE: Final = ord('"')
_AUDIO_PARTS: Final = frozenset({"input_audio", "audio_url"})  # OpenAI's, and vLLM's for one that is fetched
_SPECIAL: Final = re.compile(r"[*?\[]")
# Coders, and not encoders and decoders: `cross-encoder/...` ranks, `encodec` speaks.
_CODE: Final = re.compile(r"(?<!(?<![a-z])en)(?<!(?<![a-z])de)code", re.IGNORECASE)

_EQUAL: Final = 0
_BEGINNING: Final = 1
_ANY: Final = 2
_PATTERN: Final = 3

# What a request without a class of the policy's gets: half way up, promised nothing.
_PRIORITY: Final = 5
_MAX_WAIT_S: Final = 30.0


class QosClass:
    """A class as the gate uses it; `index` is its place in `Classes.all`. `sla_s` inf: nothing is promised."""

    __slots__ = (
        "budget_factor",
        "evict_streams",
        "index",
        "late_reject",
        "max_wait_s",
        "name",
        "preemptible",
        "priority",
        "sla_s",
        "weight",
    )

    def __init__(
        self,
        name: str,
        index: int,
        sla_s: float,
        preemptible: bool = False,
        priority: int = _PRIORITY,
        weight: float = 1.0,
        late_reject: bool = False,
        evict_streams: bool = False,
        max_wait_s: float = _MAX_WAIT_S,
        budget_factor: float = 1.0,
    ) -> None:
        self.name = name
        self.index = index
        self.sla_s = sla_s
        self.preemptible = preemptible
        self.priority = priority
        self.weight = weight
        self.late_reject = late_reject
        self.evict_streams = evict_streams
        self.max_wait_s = max_wait_s
        self.budget_factor = budget_factor


class Classes:
    """The classes of one policy. `all`: highest priority first, those of one priority in file order, `default` among
    them. `reads_modality`: some match asks for one, so that `classify` has to be given it."""

    __slots__ = ("_headers", "_matches", "_paths", "all", "by_name", "default", "reads_modality")

    def __init__(self, policies: tuple[QosPolicy, ...]) -> None:
        made = [_made(policy) for policy in policies]
        self.by_name: dict[str, QosClass] = {each.name: each for each in made}
        if DEFAULT_CLASS not in self.by_name:
            self.by_name[DEFAULT_CLASS] = QosClass(DEFAULT_CLASS, 0, inf)
        self.default: QosClass = self.by_name[DEFAULT_CLASS]
        ordered = list(self.by_name.values())
        ordered.sort(key=_rank)
        for index, each in enumerate(ordered):
            each.index = index
        self.all: tuple[QosClass, ...] = tuple(ordered)
        matches: list[_Match] = []
        for policy in policies:
            for match in policy.match:
                matches.append(_Match(match, self.by_name[policy.name]))
        self._matches = matches
        self._headers: frozenset[bytes] = frozenset([match.header for match in matches if match.header])
        self._paths = any(match.path is not None for match in matches)
        self.reads_modality: bool = any(match.modality != "" for match in matches)

    def classify(
        self,
        named: str,
        headers: Sequence[Line],
        claims: Mapping[str, object],
        path: bytes,
        model: str,
        tenant: str,
        modality: str,
    ) -> QosClass:
        """The class of a request. `named`: by `identity.class`, "" for none; `headers`: those that are believed;
        `path`: without its query; `modality`: "" where nothing `reads_modality`."""
        if named:
            known = self.by_name.get(named)
            if known is not None:
                return known
        matches = self._matches
        if not matches:
            return self.default
        found: dict[bytes, str] | None = None
        wanted = self._headers
        if wanted:
            for line in headers:
                name = line.name
                if name in wanted:
                    if found is None:
                        found = {name: _text(line.value)}
                    elif name not in found:
                        found[name] = _text(line.value)
        target = path.decode("latin-1") if self._paths else ""
        for match in matches:
            # What is asked for most is looked at first, and without a call.
            if match.header:
                value = found.get(match.header) if found is not None else None
                if not value or not match.value.fits(value):
                    continue
            elif match.claim and not (claims and match.fits_claim(claims)):
                continue
            if (
                (match.modality and match.modality != modality)
                or (match.path is not None and not match.path.fits(target))
                or (match.model is not None and not match.model.fits(model))
                or (match.tenant is not None and not match.tenant.fits(tenant))
            ):
                continue
            return match.qos
        return self.default


class _Glob:
    """`*`, `?` and `[...]` as in model names; case counts."""

    __slots__ = ("_kind", "_pattern", "_text")

    def __init__(self, glob: str) -> None:
        special = _SPECIAL.search(glob)
        self._pattern: re.Pattern[str] | None = None
        self._text = glob
        if special is None:
            self._kind = _EQUAL
        elif glob == "*":
            self._kind = _ANY
        elif glob[special.start() :] == "*":
            self._kind = _BEGINNING
            self._text = glob[:-1]
        else:
            self._kind = _PATTERN
            self._pattern = re.compile(translate(glob))

    def fits(self, text: str) -> bool:
        kind = self._kind
        if kind == _EQUAL:
            return text == self._text
        if kind == _ANY:
            return True
        if kind == _BEGINNING:
            return text.startswith(self._text)
        pattern = self._pattern
        return pattern is not None and len(text) <= MAX_TEXT and pattern.match(text) is not None


class _Match:
    """A `match`: what is None or "" is not asked for. It has a header or a claim, and not both (`policy.check_qos`)."""

    __slots__ = ("_way", "claim", "header", "modality", "model", "path", "qos", "tenant", "value")

    def __init__(self, match: QosMatch, qos: QosClass) -> None:
        self.qos = qos
        self.header: bytes = match.header.lower().encode("latin-1", "replace")
        self.claim: str = match.jwt_claim
        self._way = tuple(match.jwt_claim.split(".")) if "." in match.jwt_claim else ()
        self.value = _Glob(match.value)
        self.path: _Glob | None = _Glob(match.path) if match.path else None
        self.model: _Glob | None = _Glob(match.model) if match.model else None
        self.tenant: _Glob | None = _Glob(match.tenant) if match.tenant else None
        self.modality: str = match.modality

    def fits_claim(self, claims: Mapping[str, object]) -> bool:
        """Whether the claim that it asks for is there, with its value."""
        if _claim_fits(claims.get(self.claim), self.value):
            return True
        return bool(self._way) and _claim_fits(_along(claims, self._way), self.value)


def modality_of(path: bytes, model: str, body: bytes, whole: WholeBody | None = None) -> str:
    """`voice`, `code` or `text`. `body` may be anything; one that no decoder takes is judged by path and model alone.

    voice: a path of audio, or an answer that shall be spoken, or a prompt with audio in it. code: a completion that
    fills in the middle (`suffix`), or a model that is named after code. `whole`: the same body, where it is decoded
    already (`Call.whole`).
    """
    if path.startswith(VOICE_PATHS) or path == VOICE_PATH:
        return "voice"
    guess = _modality_of_body(path, body, whole)
    if guess:
        return guess
    return "code" if _CODE.search(model[:MAX_TEXT]) is not None else "text"


def _modality_of_body(path: bytes, body: bytes, whole: WholeBody | None) -> str:
    size = len(body)
    if size > MAX_BODY or (size > MAX_OBJECTS and body.count(b"{") > MAX_OBJECTS):
        return ""
    parsed: ModalBody | WholeBody
    if whole is not None:
        parsed = whole
    else:
        try:
            parsed = decode_modal(body)
        except (msgspec.MsgspecError, RecursionError):
            return ""
    if _is_spoken(parsed.modalities) or _has_audio(parsed.messages) or _has_audio(parsed.input):
        return "voice"
    suffix = memoryview(parsed.suffix)
    if path == COMPLETIONS and suffix.nbytes > 2 and suffix[0] == _QUOTE:
        return "code"
    return ""


def _is_spoken(modalities: msgspec.Raw) -> bool:
    if not 0 < memoryview(modalities).nbytes <= MAX_MODALITIES:
        return False
    try:
        return "audio" in decode_modalities(modalities)
    except (msgspec.MsgspecError, RecursionError):
        return False


def _has_audio(turns: msgspec.Raw) -> bool:
    if not memoryview(turns).nbytes:
        return False
    try:
        for turn in decode_turns(turns):
            if _is_audio(turn.type):
                return True
            content = memoryview(turn.content)
            if content.nbytes and content[0] == _BRACKET:
                for part in decode_parts(content):
                    if _is_audio(part.type):
                        return True
    except (msgspec.MsgspecError, RecursionError):
        return False  # the engine is the judge of what is no prompt
    return False


def _is_audio(kind: msgspec.Raw) -> bool:
    word = memoryview(kind)
    return 0 < word.nbytes <= MAX_WORD and word[0] == _QUOTE and decode_text(kind) in _AUDIO_PARTS


def _made(policy: QosPolicy) -> QosClass:
    return QosClass(
        policy.name,
        0,
        policy.latency_sla_ms / 1000,
        policy.preemptible,
        policy.priority,
        policy.weight,
        policy.late == "reject",
        policy.evict == "streams",
        float(policy.max_wait_s),
        policy.budget_factor,
    )


def _rank(qos: QosClass) -> int:
    return -qos.priority


def _text(value: bytes) -> str:
    value = value.strip(b" \t")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _along(claims: Mapping[str, object], way: tuple[str, ...]) -> object:
    found: object = claims
    for name in way:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _claim_fits(value: object, glob: _Glob) -> bool:
    """Whether a claim, or an item of one that is a list, fits; numbers and truth as JSON writes them."""
    if isinstance(value, list):
        return any(not isinstance(item, list) and _claim_fits(item, glob) for item in value[:MAX_ITEMS])
    if isinstance(value, str):
        return value != "" and glob.fits(value)
    if isinstance(value, bool):
        return glob.fits("true" if value else "false")
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64 and glob.fits(str(value))
    return False
