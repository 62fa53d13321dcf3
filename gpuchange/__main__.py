"""`python -m gpuchange`."""

from gpuchange.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
