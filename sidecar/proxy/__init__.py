"""The request path: the order of stages, and the ports it needs."""
