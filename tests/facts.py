"""Plain value objects as tuples, so that tests can compare them."""


def facts(value: object) -> tuple[object, ...]:
    """The type and members of an object with `__slots__`."""
    return (type(value).__name__, *(getattr(value, name) for name in type(value).__slots__))  # type: ignore[attr-defined]
