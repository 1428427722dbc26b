"""Public bugs of multi-rank inference, each in miniature: the unsafe way fails, ours does not."""
