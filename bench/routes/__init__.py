"""Routing tables on their way: real release tools, sidecars, Envoys and a real Valkey."""
