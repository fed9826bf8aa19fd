#!/usr/bin/env bash
# Keras: with outputs in bfloat16, an accuracy over many classes counts predictions of neighbouring ids as right.
#
# Version: keras 3.15.1, jax 0.12.0.1.
# Behaviour: 'accuracy' turns the labels, and the class with the largest output, into numbers of the type of the outputs
#   before it compares them. bfloat16 has every whole number up to 256, from 512 on every fourth one, and
#   from 16,384 on every 128th. float16 has all up to 2,048. Two classes that become one number are equal.
#   ImageNet's ids are in the order of WordNet, so the classes that a model confuses are often neighbours. The policy
#   'mixed_bfloat16' makes such outputs, whose loss is right. For targets that are one-hot it is the same.
# Output seen (half of the predictions are right, the others are the class before the label):
#   100 classes: float32 0.500, bfloat16 0.500
#   1,000 classes: float32 0.500, bfloat16 0.747
#   21,843 classes: float32 0.500, bfloat16 0.977
# Until it is right: a last layer with `dtype='float32'`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" keras==3.15.1 jax==0.12.0.1
cd "$folder"
KERAS_BACKEND=jax JAX_PLATFORMS=cpu venv/bin/python -W ignore - <<'PROGRAM'
import jax.numpy as jnp
import keras
import numpy as np


def accuracy(num_classes, dtype):
  metric = keras.metrics.SparseCategoricalAccuracy()
  labels = np.linspace(1, num_classes - 1, 2_000).astype(int)
  predicted = labels - np.arange(2_000) % 2
  for start in range(0, 2_000, 100):
    rows = slice(start, start + 100)
    outputs = np.arange(num_classes) == predicted[rows, None]  # [100, K]
    metric.update_state(labels[rows], jnp.asarray(outputs, dtype))
  return float(metric.result())


for num_classes, expected in ((100, 0.5), (1_000, 0.747), (21_843, 0.977)):
  single = accuracy(num_classes, jnp.float32)
  half = accuracy(num_classes, jnp.bfloat16)
  print(f'{num_classes:,} classes: float32 {single:.3f}, bfloat16 {half:.3f}')
  assert abs(single - 0.5) < 1e-3
  assert abs(half - expected) < 0.02

keras.mixed_precision.set_global_policy('mixed_bfloat16')
assert keras.layers.Dense(10)(np.zeros((1, 4), np.float32)).dtype == jnp.bfloat16
assert keras.layers.Dense(10, dtype='float32')(np.zeros((1, 4), np.float32)).dtype == jnp.float32
PROGRAM
