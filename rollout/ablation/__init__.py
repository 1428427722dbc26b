"""Comparing ways to serve prefill and decode: the same work, run by turns, with honest figures."""
