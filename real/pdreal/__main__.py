"""python -m pdreal"""

from pdreal.cli import main

main()
