"""The client's side: listener, protocol, reply with back-pressure, drain."""
