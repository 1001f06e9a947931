"""Describes any decoder of transformers, layer by layer as opaque blocks."""
