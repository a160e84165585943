"""The comparison: the sidecar beside Envoy, nginx and others, in one run on one machine."""
