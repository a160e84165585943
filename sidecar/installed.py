"""What is installed: its version, and whether its request path is compiled (docs/adr/0007).

Asking imports neither the request path nor anything that it needs: `sidecar version` answers at once.
"""

from importlib.machinery import ExtensionFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

_OF_THE_PATH = "sidecar.proxy.pipeline"
"""All modules of the path are compiled together or none is, so one tells."""


def number() -> str:
    """The version; `unknown` where the package runs from a tree that was never installed."""
    try:
        return version("llm-sidecar")
    except PackageNotFoundError:
        return "unknown"


def compiled() -> bool:
    """Whether requests are served by machine code, not by Python."""
    spec = find_spec(_OF_THE_PATH)
    return spec is not None and isinstance(spec.loader, ExtensionFileLoader)
