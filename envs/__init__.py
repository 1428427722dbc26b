"""Text environments with the gymnasium API. Imports gymnasium; what else one needs, only with it."""
