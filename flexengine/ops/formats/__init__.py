"""Formats that weights are stored in, with fewer bytes than they are computed in."""
