"""Parts of experiments/profile_step.py."""
