"""`python -m coowned`: the command line, for launchers that start a module, such as torchrun."""

from coowned.cli.main import main

if __name__ == "__main__":
    main()
