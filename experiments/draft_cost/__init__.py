"""What a round costs with every drafter: see README.md."""
