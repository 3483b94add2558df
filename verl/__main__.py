"""`python -m verl`: the command `verl`."""

from verl.cli import main

if __name__ == "__main__":
    main()
