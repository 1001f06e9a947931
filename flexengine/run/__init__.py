"""The story of a run of `train`, and who watches it."""
