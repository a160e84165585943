"""The adaptive breaker beside the rules it has to beat, in a simulated world."""
