"""Python under libfaketime, which passes a time in the past to the system call of `time.sleep`."""

import select
import time

time.sleep = lambda seconds: select.select((), (), (), seconds) and None
