"""A sidecar beside each LLM engine: relay, observe, break."""
