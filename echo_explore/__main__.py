"""`python -m echo_explore`: the same as the echo-explore command."""

from echo_explore.cli.main import main

if __name__ == "__main__":
    main()
