"""``python -m fedcc``."""

from fedcc.cli import main

if __name__ == "__main__":
    main()
