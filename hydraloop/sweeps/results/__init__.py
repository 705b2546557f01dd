"""What users see of a sweep: the live table, the files with results, and their tables."""
