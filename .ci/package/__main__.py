"""The command of the installed package: python3 -m femtoqueue."""

import sys

from femtoqueue import main

# A user's json.py in the current directory must not hide Python's own.
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]
sys.exit(main())
