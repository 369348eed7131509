"""The figure of docs/predict.md: ``python experiments/abstention_figure.py RECORD.json FIGURE.png``."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

LABELS = {"fedcc": "FedCC", "fedmd": "FedMD", "fedavg": "FedAvg"}

record, out = sys.argv[1:]
rows = json.loads(Path(record).read_text())["rows"]
figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
for name, label in LABELS.items():
    curves = [row["coverage"] for row in rows if row["method"] == name]
    coverage = 100 * np.array([float(share) for share in curves[0]])
    values = np.array([list(curve.values()) for curve in curves])
    (line,) = axis.plot(coverage, values.mean(0), marker="o", markersize=3, label=label)
    axis.fill_between(coverage, values.min(0), values.max(0), alpha=0.15, color=line.get_color())
axis.set(xlabel="answered, % of known inputs", ylabel="accuracy of the answers, %", ylim=(0, 102))
axis.legend()
figure.savefig(out, dpi=150)
