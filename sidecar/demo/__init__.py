"""Simulated engines with scripted faults, for the demo, tests, load tests and benchmarks."""
