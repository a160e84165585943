"""Bytes to events and back, pure: SSE, headers, the few body fields we read."""
