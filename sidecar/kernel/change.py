"""What both those who decide and those who speak an engine's language say of a change of its model."""

import msgspec


class Before(msgspec.Struct, frozen=True):
    """What an endpoint has before anything is touched. `loaded`: a model of this name serves there; `versions` of it,
    `path` of an adapter, `config` of a Triton model as JSON. `forgets`: it can be told to forget what it has cached."""

    loaded: bool = False
    versions: tuple[str, ...] = ()
    path: str = ""
    config: str = ""
    forgets: bool = True


class Done(msgspec.Struct, frozen=True):
    """It is done. `before`: what a look found."""

    detail: str = ""
    before: Before | None = None


class Again(msgspec.Struct, frozen=True):
    """Not yet: try again."""

    why: str


class Failed(msgspec.Struct, frozen=True):
    """It is not done, and trying again would not help. `doubted`: it may have been done, or may be done yet."""

    why: str
    doubted: bool = False


Outcome = Done | Again | Failed
