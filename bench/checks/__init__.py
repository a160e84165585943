"""That the benchmark measures what it says: the C programs, the statistics, the report. `make bench-check`."""
