"""Quality of service, measured: who is served in time under overload, and what deciding it costs (docs/qos.md)."""
