"""What the vLLM connector is made of; all but ``stats.py`` works without vLLM."""
