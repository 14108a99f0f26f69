"""`python -m rhymerl` is `rhymerl`."""

import sys

from rhymerl.cli import main

sys.exit(main())
