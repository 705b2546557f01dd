"""Validation, test and prediction."""
