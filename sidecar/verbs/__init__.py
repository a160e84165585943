"""What may be typed behind `sidecar`: verbs, flags, examples. What a verb does is told to `sidecar.cli` by one word."""
