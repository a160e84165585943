"""Simulated rollouts: how often a good canary is taken back, how soon a bad one is (docs/canary.md)."""
