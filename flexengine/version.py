"""The version of the package, in a module of its own so that every room may say it."""

__version__ = "0.2.0.dev0"
