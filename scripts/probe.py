"""Measure the memory that cells of a sweep take and the batches that fit, and pin it for the next plan."""

import sys

from sweepack.sizing.probe import main

sys.exit(main())
