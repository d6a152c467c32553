"""Keeps third-party progress bars and advice off the screen while weights are converted or loaded.

What matters to a user is logged by the caller in one line before and after. Errors still propagate. This module can't
silence what a library writes straight to the file descriptor.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No `transformers` log lines below errors, no bars, no warnings, until the block ends."""
    from transformers.utils import logging as hf_logging

    verbosity, has_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    # tqdm bars that transformers doesn't own can only be caught at the stream they write to.
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            if has_bars:
                hf_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The message of an error as one short line, for use inside our own one-line messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 300 else text[:297] + "..."
