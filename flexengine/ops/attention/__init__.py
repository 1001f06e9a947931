"""Attention: the op, its paths, and what stands around its heads."""
