"""A search: a sweep whose next job depends on the results of earlier ones."""
