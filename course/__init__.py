"""The machine that fetches, runs, checks and reports; a learner never opens it."""

import sys

# Said before anything else is imported, since an older Python cannot read the rest.
if sys.version_info < (3, 11):  # noqa: UP036
    here = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    sys.exit(
        "the course needs Python 3.11 or newer, and this is Python " + here + "\n"
        "  next:  run the same command with a newer one, such as python3.12"
    )
