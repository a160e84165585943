"""Plain value objects as tuples, so that tests can compare them."""

from types import GetSetDescriptorType, MemberDescriptorType


def members(kind: type) -> list[str]:
    """The names that a class with `__slots__` keeps values under, interpreted or compiled."""
    kept = MemberDescriptorType | GetSetDescriptorType
    return [name for name, member in vars(kind).items() if isinstance(member, kept) and not name.startswith("__")]


def facts(value: object) -> tuple[object, ...]:
    """The type and members of an object with `__slots__`."""
    return (type(value).__name__, *(getattr(value, name) for name in members(type(value))))
