"""How many of something, as it is said to people."""


def counted(count: int, one: str, more: str = "") -> str:
    """`1 sidecar`, `2 sidecars`. `more`: the plural, where it is not the singular with an s; empty: it is."""
    return f"{count} {one}" if count == 1 else f"{count} {more or one + 's'}"
