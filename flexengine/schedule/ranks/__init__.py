"""What several ranks add to programs: shares, semaphores, order, checks, and all ranks simulated together."""
