"""`python -m classlens` is the command `classlens`."""

from classlens.cli import main

main()
