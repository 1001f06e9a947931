"""What knows of ranks: who there is, one copy of host memory per node, signals between processes, and lost ranks."""
