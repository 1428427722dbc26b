"""Text environments with the gymnasium API. Imports gymnasium, and what one of them plays."""
