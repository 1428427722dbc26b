"""Text environments with the gymnasium API. Imports gymnasium only."""
