"""`python -m fuzz`: random calls for a time, their counts, and a line that repeats each failure.

python -m fuzz --where cpu interpret --seconds 600 --seed 0 --workers 2
python -m fuzz --where cuda --seconds 480 --workers 8
python -m fuzz --where cpu --seed 0 --only 1234            that case alone, here
python -m fuzz --where cpu --count 300 --seconds 60        so many cases, or fewer
"""

from __future__ import annotations

import argparse
import sys

from fuzz.environment import WHERE


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("fuzz", description=__doc__)
    made.add_argument("--where", nargs="+", choices=WHERE, default=["cpu"])
    made.add_argument("--seconds", type=float, default=600.0, help="in all, with the summary")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--workers", type=int, default=1, help="processes, shared out over --where")
    made.add_argument("--count", type=int, default=0, help="cases of each --where; 0: no bound")
    made.add_argument("--first", type=int, default=0, help="the number of the first case")
    made.add_argument("--kinds", default="", help="names of the catalogue, with commas")
    made.add_argument("--only", default="", help="a case, or FIRST-LAST: here, without processes")
    made.add_argument("--group", type=int, default=0, help="cases that share what is compiled")
    made.add_argument("--json", default="", help="a line for every case, appended to this file")
    made.add_argument("--verbose", action="store_true", help="what every case is")
    made.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    from fuzz import running

    if options.worker:
        return running.work(options)
    if options.only:
        return running.repeat(options)
    return running.run(options)


if __name__ == "__main__":
    sys.exit(main())
