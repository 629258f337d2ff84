"""Run one cell: hand its result over if it is finished, else lease its share of a device and run its task."""

import sys

from sweepack.launch import main

sys.exit(main())
