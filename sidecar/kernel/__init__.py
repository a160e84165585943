"""Nouns that every layer shares; imports nothing of ours."""
