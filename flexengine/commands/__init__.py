"""Commands that have a page of their own: each module parses its flags in `main(argv)` and returns an exit status."""
