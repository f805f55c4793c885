"""`python -m headrace`: the command line."""

import os
import sys
from pathlib import Path

command = Path(__file__).parent / "bin" / "headrace"
os.execv(command, [str(command), *sys.argv[1:]])
