"""Policy files: their schema, their loading and the current snapshot. Pure: bytes in, snapshot or errors out."""
