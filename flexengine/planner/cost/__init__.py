"""Bytes and seconds of plans, rounds and commands."""
