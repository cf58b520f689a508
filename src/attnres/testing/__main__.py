"""``python -m attnres.testing ADAPTER [CHECK...]``: verdicts on a shipped adapter as JSON; what child processes run."""

import json
import sys

from attnres.testing.adapters import shipped
from attnres.testing.report import verdicts_as_dict
from attnres.testing.suite import run, select

name, *checks = sys.argv[1:]
print(json.dumps(verdicts_as_dict(run(shipped(name).make(), select(checks)))))
