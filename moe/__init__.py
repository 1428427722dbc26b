"""Mixture-of-Experts language models whose forward pass suspends at every collective."""
