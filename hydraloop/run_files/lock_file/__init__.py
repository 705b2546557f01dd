"""The file of a lock: what it says, and how processes of one or several machines read and write it."""
