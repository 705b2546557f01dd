"""Errors of composing a config, as one message with the key, the problem and the fix."""
