"""Tests of the process of a job."""
