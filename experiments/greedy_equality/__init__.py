"""Greedy texts of every drafter against autoregressive decoding: see README.md."""
