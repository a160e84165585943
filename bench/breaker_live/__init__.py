"""The breaker's experiment on real sockets: engines, sidecar and clients as they are, minutes by the wall."""
