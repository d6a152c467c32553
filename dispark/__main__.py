"""`python -m dispark`: the console script for a checkout or an environment whose scripts are not on the path."""

from __future__ import annotations

import sys


def _main() -> int:
    try:
        from dispark.cli import main
    except ModuleNotFoundError as error:
        print(f"dispark: error: {error.name} is not installed; run: python -m pip install -e .", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(_main())
