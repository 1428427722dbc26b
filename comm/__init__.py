"""Ordered, isolated communication for several forward passes on the same devices."""
