"""Experts: routing, grouped products, shared gates."""
