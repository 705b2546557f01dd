"""Records: the entries that each has, and the pictures, tables and other objects that they name."""
