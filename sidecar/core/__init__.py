"""Decisions, pure: time and chance are arguments."""
