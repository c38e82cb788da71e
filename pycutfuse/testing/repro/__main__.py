"""``python -m pycutfuse.testing.repro``."""

import sys

from pycutfuse.testing.repro.cli import main

if __name__ == "__main__":
    sys.exit(main())
