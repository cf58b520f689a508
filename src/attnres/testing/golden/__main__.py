"""``python -m attnres.testing.golden [FOLDER]`` makes the golden vectors anew."""

import sys
from pathlib import Path

from attnres.testing.golden import FOLDER
from attnres.testing.golden.make import make

make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
