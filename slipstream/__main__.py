"""`python -m slipstream` is the console script `slipstream`."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
