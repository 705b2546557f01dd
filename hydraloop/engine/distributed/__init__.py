"""Several ranks: the communication interface, process groups, FSDP2."""
