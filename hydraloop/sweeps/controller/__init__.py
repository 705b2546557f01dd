"""The loop of a sweep, what it does with signals, and which jobs it starts again."""
