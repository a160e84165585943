"""The aiohttp app for operators: health, metrics, breakers, routes, sessions, drain."""
