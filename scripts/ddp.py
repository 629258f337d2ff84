"""Run one cell on several devices: start its ranks and follow them."""

import sys

from sweepack.ddp.launch import main

sys.exit(main())
