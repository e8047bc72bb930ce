"""`python -m overspill.cli` is the command `overspill`."""

import sys

from overspill.cli import main

sys.exit(main())
