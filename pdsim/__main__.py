"""python -m pdsim"""

from pdsim.cli import main

main()
