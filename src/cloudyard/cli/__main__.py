"""`python -m cloudyard.cli`: the same as `cloudyard`."""

import sys

from cloudyard.cli import main

sys.exit(main())
