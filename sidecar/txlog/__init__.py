"""The distributed transaction log: what sidecars agree on, as versioned records in Redis; never on the path."""
