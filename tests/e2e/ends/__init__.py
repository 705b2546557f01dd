"""How runs end: what the exit code, the message and `result.json` say, and whether the printed command works."""
