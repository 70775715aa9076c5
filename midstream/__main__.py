"""``python -m midstream`` is the ``midstream`` command."""

import sys

from midstream.cli import main

sys.exit(main())
