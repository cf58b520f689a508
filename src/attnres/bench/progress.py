"""Signs of life on standard error, so that results on standard output stay clean."""

import sys
import time

_BEGAN = time.monotonic()


def say(message: str) -> None:
    """Print what happens now, with the time since the program began."""
    minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
    print(f"[{minutes:d}:{seconds:02d}] {message}", file=sys.stderr, flush=True)
