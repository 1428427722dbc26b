"""What users of other systems complain about in public, and what Interlace does about it."""
