"""How the client wants its answer chosen: numbers, stop strings and flags, checked and named as vLLM names them.

Elsewhere the engine is the judge of its own fields. Where its answer does not tell whose fault it was (Triton: 400 for
a value out of range and for a dead process; MII: 500 for both), one client with `temperature: -1` would pass for a
broken engine and open its breaker. So what goes to such an engine is held to vLLM's rules before it is sent.
"""

from math import isfinite
from typing import Final

from sidecar.adapters.ask import Ask
from sidecar.kernel.errors import Reason, SidecarError
from sidecar.wire.shapes import Number

_INT32: Final = (1 << 31) - 1
"""What a tensor of TYPE_INT32 holds, and more tokens than any context."""

_INT64: Final = (1 << 63) - 1

_WHOLE: Final = {
    "max_tokens": (1, _INT32),
    "min_tokens": (0, _INT32),
    "seed": (-_INT64 - 1, _INT64),
    "top_k": (-1, _INT32),
}
"""Whole numbers, from and up to."""

_REAL: Final = {
    "frequency_penalty": (-2.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e6),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
}
"""Other numbers, from and up to. vLLM bounds temperature and repetition penalty on one side; a million is as good."""

_NOT_ZERO: Final = frozenset({"repetition_penalty", "top_p"})


def numbers_of(ask: Ask) -> dict[str, int | float]:
    """The numbers that the client named. Raises `SidecarError` (`BAD_REQUEST`) where one is none, or out of range."""
    body = ask.body
    named: tuple[tuple[str, Number], ...] = (
        ("max_tokens", ask.max_tokens),
        ("temperature", body.temperature),
        ("top_p", body.top_p),
        ("top_k", body.top_k),
        ("min_p", body.min_p),
        ("seed", body.seed),
        ("presence_penalty", body.presence_penalty),
        ("frequency_penalty", body.frequency_penalty),
        ("repetition_penalty", body.repetition_penalty),
        ("min_tokens", body.min_tokens),
    )
    return {name: _checked(name, value) for name, value in named if value is not None}


def stops_of(ask: Ask) -> list[str]:
    """The stop strings, perhaps none. Raises `SidecarError` (`BAD_REQUEST`) for an empty one."""
    stop = ask.body.stop
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if "" in stops:
        raise _bad("stop: cannot contain an empty string")
    return stops


def _checked(name: str, value: int | float | str) -> int | float:
    whole = _WHOLE.get(name)
    number: int | float
    try:
        if whole is not None and isinstance(value, int):
            number = value
        elif whole is not None and isinstance(value, str):
            number = int(value)
        else:
            number = float(value)
            if whole is not None and number.is_integer():
                number = int(number)
    except (ValueError, OverflowError) as exc:
        raise _bad(f"{name}: expected a number") from exc
    if whole is not None and not isinstance(number, int):
        raise _bad(f"{name}: expected an integer")
    low, high = whole if whole is not None else _REAL[name]
    if not isfinite(number) or not low <= number <= high or (number == 0 and name in _NOT_ZERO):
        bound = "above" if name in _NOT_ZERO else "from"
        raise _bad(f"{name}: {number} is out of range, {bound} {low:,.15g} to {high:,.15g}")
    return number


def _bad(detail: str) -> SidecarError:
    return SidecarError(Reason.BAD_REQUEST, "downstream", detail)
