"""The control plane that every sidecar serves: the descriptor stream over gRPC, and the same tables over xDS.

What gRPC is to know before it is imported stands here, since whatever imports it in this package comes by here first.
"""

import os

# It would log handshakes that fail to stderr, as many as a stranger likes; what is of use is in our own log. And the
# processes that we start are other programs, which need none of what gRPC does around a fork, and may die of it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
