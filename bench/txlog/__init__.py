"""What the transaction log costs and how quick it is: real processes, a real server."""
