"""How many tokens a prompt has: counted exactly where there is time, from what was counted before, or estimated."""
