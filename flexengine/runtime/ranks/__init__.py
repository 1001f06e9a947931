"""What a rank of several does besides its own round."""
