"""The parts of the request path one by one, each within a budget of nanoseconds: `make bench-micro`."""
