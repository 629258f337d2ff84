# A process a cell, two at a time.
python grid.py | xargs -P 2 -L 1 python tasks.py
