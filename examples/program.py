"""Any program can be a cell. This one happens to be Python and knows nothing of sweepack: it reads its parameters from
a JSON file (and one of them from the environment) and writes its metrics to another."""

import json
import os
import sys

with open(sys.argv[1]) as file:
    parameters = json.load(file)
x, y = parameters["x"], parameters["y"]
assert os.environ["SWEEPACK_PARAM_LABEL"] == parameters["label"]

value = (1 - x) ** 2 + 100 * (y - x * x) ** 2
print(f"{parameters['label']}: f({x}, {y}) = {value}")
with open(sys.argv[2], "w") as file:
    json.dump({"value": value}, file)
