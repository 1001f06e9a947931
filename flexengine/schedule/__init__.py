"""The step as a program: commands on slots, lowered from a plan, checked, simulated and drawn without a GPU."""
