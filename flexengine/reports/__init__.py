"""Plans and runs in words, data and pictures. Reads the planner; the planner never reads it."""
