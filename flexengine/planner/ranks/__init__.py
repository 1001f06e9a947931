"""Plans and prices of several ranks, from the plan of one rank's share of a step."""
