"""The command of the installed package: python3 -m femtoqueue."""

import sys

from femtoqueue import _import_only_libraries, main

_import_only_libraries()
sys.exit(main())
