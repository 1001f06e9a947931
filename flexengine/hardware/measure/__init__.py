"""Measures the rates of a machine, subject by subject."""
