"""``python -m treeopt``."""

from treeopt.cli import main

if __name__ == "__main__":
    main(prog_name="treeopt")
