"""Carries out programs: streams, events, work of the CPU, CUDA graphs."""
