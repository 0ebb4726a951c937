"""Exit codes, the same for every command."""

from __future__ import annotations

DONE, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

EXIT_CODES = {  # docs/scripts.md has this table
    DONE: "Done. `vitrail serve` also ends so when it is stopped by a signal.",
    FAILED: "An error, in one line on the standard error; or some images, rows or cells failed, and the others are "
    "written. Also, silently, if the reader of a pipe is gone.",
    USAGE: "Wrong usage: an unknown command or option, a missing argument, a value of the wrong type.",
    INTERRUPTED: "Stopped by Ctrl-C. Everything written so far is complete; `bench`, `audit`, `reproduce` and "
    "`train-explainer` resume.",
    TERMINATED: "Stopped by SIGTERM, likewise.",
}
