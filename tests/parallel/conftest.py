"""The pool of processes that all tests of several ranks share."""

import pytest

from parallel.processes import Processes


@pytest.fixture(scope="session")
def processes():
    pool = Processes()
    yield pool
    pool.stop()
