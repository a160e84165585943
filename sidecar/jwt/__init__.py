"""Bearer tokens that we verify ourselves: what is read of one, whose keys there are, and what comes of holding them
together.

Only `keys` imports the library (joserfc, with it cryptography), and `keys` is imported where a policy has providers:
most have none.
"""
