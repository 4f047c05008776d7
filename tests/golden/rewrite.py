"""`python -m tests.golden.rewrite`: record the golden serial run again, after an intended change of numbers."""

import json
import tempfile
from pathlib import Path

from tests import runs
from tests.e2e.test_serial_run import GOLDEN, train

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = train(runs.make_task(Path(folder), warm=False), "golden")
    GOLDEN.write_text(json.dumps(rows, indent=2) + "\n")
