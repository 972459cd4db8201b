"""`python -m accel_yolo` is `accel-yolo`."""

import sys

from accel_yolo.cli import main

if __name__ == "__main__":
    sys.exit(main())
