"""Gauges out of a Prometheus page, without reading the page.

Pages have 60 KB, nearly all of it histograms, and are read every second: a name is searched for, and no line else is
looked at.
"""

from math import isfinite

_NEWLINE = ord("\n")
_AFTER_NAME = frozenset(b"{ \t")


def total(text: bytes, name: bytes, label: bytes = b"") -> int | None:
    """A gauge summed over its label sets, those that hold `label` (`key="value"`) where one is given.

    None if there is no such sample, or one that counts nothing.
    """
    sum_ = 0.0
    found = False
    at = text.find(name)
    while at >= 0:
        after = at + len(name)
        if (at == 0 or text[at - 1] == _NEWLINE) and after < len(text) and text[after] in _AFTER_NAME:
            end = text.find(b"\n", after)
            if end < 0:
                end = len(text)
            # Labels may hold spaces and braces; a line feed in one is escaped, and after the last brace there is none.
            value_at = max(after, text.rfind(b"}", after, end) + 1)
            if not label or text.find(label, after, value_at) >= 0:
                sample = text[value_at:end].split(None, 1)
                try:
                    sum_ += float(sample[0])
                except (IndexError, ValueError):
                    return None
                found = True
            after = end
        at = text.find(name, after)
    return int(sum_) if found and isfinite(sum_) and sum_ >= 0 else None
