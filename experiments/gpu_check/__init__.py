"""The check of the framework on a CUDA device; start with run.py."""
