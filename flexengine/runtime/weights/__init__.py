"""Where weights and states lie between their uses, and how they come in and out."""
