"""xDS: the routing tables, said to Envoys as clusters, endpoints, listeners and routes (docs/xds.md)."""
