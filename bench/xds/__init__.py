"""xDS with real Envoys: weights under load, a refusal, a server that is killed, streams, sessions, growth."""
