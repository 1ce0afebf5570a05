"""``python -m flatmin`` and the ``flatmin`` command."""

import sys


def main() -> None:
    """Run the command line; without the study extra, say how to get it."""
    try:
        from flatmin.cli import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flatmin":
            raise
        print(
            f"error: {error.name} is not installed; the command line needs: pip install 'flatmin[study]'",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
