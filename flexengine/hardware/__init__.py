"""What a machine can do: profiles, the probe that measures them, and presets of known cards."""
