"""The engines' side: pool, one exchange, a deadline per phase, health checks."""
