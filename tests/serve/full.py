"""How much the tests of the server do: `make test-serving` has them do all."""

import os

FULL = os.environ.get("EFFINFER_FULL") == "1"
