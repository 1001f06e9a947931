"""What a person sets, told once: as flags, YAML keys and Python keywords."""
