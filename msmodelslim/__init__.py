"""Quantize large language models on many devices at once: N devices give the same bytes as one."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older interpreter can run this file, and would stop in another one
    sys.exit("msmodelslim needs Python 3.11 or newer; this is " + sys.version.split()[0])

__version__ = "0.1.0"
