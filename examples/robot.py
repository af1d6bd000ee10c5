"""
A robot's side: runs an exported policy at a fixed rate with onnxruntime and NumPy alone, and prints how far steps came late.

    python examples/robot.py policy.onnx --hertz 50 --seconds 2

`sb3_flow.export(model, "policy.onnx")` writes the file, of a policy without masks and without memory. Observations are zeros
here; a robot reads its sensors.
"""

import argparse
import json
import time

import numpy as np
import onnxruntime

TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file")
parser.add_argument("--hertz", type=float, default=50.0, help="actions per second")
parser.add_argument("--seconds", type=float, default=2.0)
given = parser.parse_args()

policy = onnxruntime.InferenceSession(given.file)
metadata = json.loads(policy.get_modelmeta().custom_metadata_map["sb3_flow"])
if set(metadata["inputs"]) - {"noise"}:
    parser.error(f"{given.file} is a {metadata['model']}, which also needs {', '.join(metadata['inputs'])}")
rng, actions, late = np.random.default_rng(0), [], []
observation = {each.name: np.zeros((1, *each.shape[1:]), TYPES[each.type]) for each in policy.get_inputs()}
start = time.perf_counter()
for step in range(round(given.seconds * given.hertz)):
    if not actions:  # the last chunk is used up
        if "noise" in metadata["inputs"]:
            observation["noise"] = rng.normal(size=(1, *metadata["inputs"]["noise"])).astype(np.float32)
        (decision,) = policy.run(None, observation)
        actions = list(decision[0] if metadata["actions_of_a_decision"] else decision)
    action = actions.pop(0)  # goes to the motors
    late.append(time.perf_counter() - start - step / given.hertz)
    time.sleep(max(0.0, (step + 1) / given.hertz - (time.perf_counter() - start)))
quantiles = np.quantile(late, [0.5, 0.99, 1.0]) * 1000
print(f"{len(late)} steps at {given.hertz:g} Hz; late by (median, 99 %, most):", *(f"{each:.2f} ms" for each in quantiles))
