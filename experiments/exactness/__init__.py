"""Parts of experiments/exactness_price.py."""
