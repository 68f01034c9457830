"""`python -m hpcrl COMMAND` runs the console command `hpcrl COMMAND`, with any interpreter that has hpcrl."""

import sys

from hpcrl.system.cli import main

if __name__ == "__main__":
    sys.exit(main())
