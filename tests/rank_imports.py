"""What ranks that compute import, done once for all executors that are forks of this process (`tests/forked.py`)."""

import os

from services.executor.supervisor.ranks.early_fork_server import BUILDERS, RUNTIME

os.environ.update(RUNTIME)  # before the imports: libraries read it when they are loaded

from services.executor.supervisor.ranks import fork_server

fork_server.prepare()
fork_server._load(BUILDERS)
