"""The control plane that every sidecar serves: the descriptor stream over gRPC, and the same tables over xDS."""
