"""``python -m meanflow`` is the command ``meanflow``, for environments without its script."""

from meanflow.cli import main

if __name__ == "__main__":
    main(prog_name="python -m meanflow")
