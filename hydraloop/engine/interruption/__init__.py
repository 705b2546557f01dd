"""What ends a run before its time, so that it can be continued."""
