"""`python -m sidecar` is the command `sidecar`."""

import sys

from sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
