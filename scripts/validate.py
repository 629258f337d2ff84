"""Try on the Slurm cluster what must hold there before a sweep is trusted to it."""

import sys

from sweepack.validation.main import main

sys.exit(main())
