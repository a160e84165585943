"""The routing tables of this sidecar: what the policy files say, with what the log says over it."""
