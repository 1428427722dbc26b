"""Evidence that the ranks stay in order: simulation, hazards and mutants of the shipped code."""
