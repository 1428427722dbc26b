"""Weights that change a thousand times under load: where they come from, the load, the checks."""
