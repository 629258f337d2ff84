"""Run the cells of a pack side by side, each on its share of a device."""

import sys

from sweepack.pack_launch import main

sys.exit(main())
