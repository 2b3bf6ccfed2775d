"""`python -m msmodelslim`, also what torchrun starts."""

import sys

from msmodelslim.cli import main

sys.exit(main())
