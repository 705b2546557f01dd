"""Checks of a composed config that need no torch, each in one place.

`config.validate` is called by the command line before anything is written, and by `build`. Each mistake is a
`UserError` with the key, the problem and the fix.
"""
