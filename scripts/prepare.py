"""Run `prepare()` of a sweep's task, once, before any cell."""

import sys

from sweepack.prepare import main

sys.exit(main())
