"""A small GRPO trainer beside a rollout: batches, loss, optimiser, and the loop around them."""
