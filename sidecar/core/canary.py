"""A canary held against its baseline: what ended of each, and what may be concluded from it at any time."""
