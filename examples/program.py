"""Any program can be a cell. This one happens to be Python, uses only its standard library and knows nothing of sweepack:
it reads parameters from a JSON file, writes metrics to another, and could read them from the environment as well."""

import json
import os
import sys

parameters = json.load(open(sys.argv[1]))
x, y = parameters["x"], parameters["y"]
assert os.environ["SWEEPACK_PARAM_LABEL"] == parameters["label"]

value = (1 - x) ** 2 + 100 * (y - x * x) ** 2
print(f"{parameters['label']}: f({x}, {y}) = {value}")
with open(sys.argv[2], "w") as file:
    json.dump({"value": value}, file)
