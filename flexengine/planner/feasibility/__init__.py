"""What fits at all, and which changes to a request would make it fit."""
