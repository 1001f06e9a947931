"""Towers of models of transformers: what gives rows to the tokens that stand for images."""
