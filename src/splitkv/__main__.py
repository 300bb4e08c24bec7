"""`python -m splitkv` and the `splitkv` command."""

from __future__ import annotations

import sys

from splitkv import __version__


def main() -> None:
    """Run the command line, which needs the packages of the extra `lab` but for `--version`."""
    if sys.argv[1:] == ["--version"]:
        print(f"splitkv {__version__}")
        return
    try:
        from splitkv.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"splitkv: the command line needs {error.name}: pip install 'splitkv[lab]'")
    app(prog_name="splitkv")


if __name__ == "__main__":
    main()
