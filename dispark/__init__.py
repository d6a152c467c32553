"""DiSpark: a benchmark and reproduction framework for speculative decoding.

One decoding loop (`dispark.decoding.loop`), and around it interchangeable drafters, verifiers and schedulers that Hydra
configs compose. Start reading there; `CONTRIBUTING.md` has the annotated tree.
"""

__version__ = "0.1.0"
