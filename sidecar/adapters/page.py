"""A Prometheus page, of which a few numbers are wanted: looked for by name, and no other line is looked at.

Such a page has tens of kilobytes, nearly all of it histograms, and is read every second: a parser would make thousands
of objects for a handful of numbers.
"""

from math import isfinite

_NEWLINE = ord("\n")
_AFTER_NAME = frozenset(b"{ \t")


def total(page: bytes, name: bytes, having: bytes = b"") -> float | None:
    """A metric summed over its label sets, >= 0; None if there is no sample, or one that is no number or below zero.

    `having`: only samples in whose labels this stands.
    """
    summed = 0.0
    found = False
    at = page.find(name)
    while at >= 0:
        after = at + len(name)
        if (at == 0 or page[at - 1] == _NEWLINE) and after < len(page) and page[after] in _AFTER_NAME:
            end = page.find(b"\n", after)
            if end < 0:
                end = len(page)
            # Labels may hold spaces and braces; a line feed in one is escaped, and after the last brace there is none.
            value_at = max(after, page.rfind(b"}", after, end) + 1)
            if not having or page.find(having, after, value_at) >= 0:
                sample = page[value_at:end].split(None, 1)
                try:
                    summed += float(sample[0])
                except (IndexError, ValueError):
                    return None
                found = True
            after = end
        at = page.find(name, after)
    return summed if found and isfinite(summed) and summed >= 0 else None


def count(page: bytes, name: bytes) -> int | None:
    """As `total`, of what counts things."""
    summed = total(page, name)
    return None if summed is None else int(summed)
