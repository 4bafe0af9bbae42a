"""Takes every scheduling decision of a run again, from the log that `--inbox-log FILE` wrote.

    python -m examples.replay FILE

Needs neither the model nor the machine of the run. Prints how many steps came out alike, or the first that did not.
"""

from __future__ import annotations

import argparse
import sys

from srt.scheduler.inbox_log import Difference, replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    try:
        print(f"{replay(parser.parse_args().file)} steps, every decision as in the run")
    except Difference as difference:
        print(difference)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
