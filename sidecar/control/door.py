"""Where the descriptor stream is served, and who is let in: what `main` makes of the settings.

Of its own so that settings and `main` know it without gRPC being imported.
"""

from pathlib import Path

import msgspec


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """An address and its locks.

    Port 0: the system picks one. `tls_cert`, `tls_key`: PEM files, both or neither; without them the port is plain.
    `tls_ca`: clients need a certificate of this authority. `token`, or the content of `token_file`, is what writers
    bring; with neither set only clients of this machine write, and those with a certificate. Without `local` only those
    with a certificate.
    """

    host: str = "127.0.0.1"
    port: int = 9402
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    token: str = ""
    token_file: Path | None = None
    local: bool = True
