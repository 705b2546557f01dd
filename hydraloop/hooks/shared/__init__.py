"""Code that several hooks share."""
