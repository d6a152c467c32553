"""What a round costs: see README.md."""
