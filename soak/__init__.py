"""The soak: mixed traffic with faults and aborts for minutes, then a look at what was left behind."""
