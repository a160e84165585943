"""Tests against the real vLLM on a CPU; `make test-engines` runs them, nothing else does."""
