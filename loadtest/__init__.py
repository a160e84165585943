"""Load tests: claims about a running sidecar, each with its load, its fault and its pass marks."""
