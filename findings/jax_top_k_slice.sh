#!/usr/bin/env bash
# jax: on a CPU, `lax.top_k` sorts all entries as soon as the program also takes a slice of its result.
#
# Version: jax 0.12.0.1 and 0.10.2 with their jaxlib, Python 3.13.
# Behaviour: XLA makes a sort and a slice of `top_k`, and a call that keeps the k largest of that pattern. A further
#   slice, such as the first column for the prediction beside a top-5 accuracy, is merged with the first one. The
#   pattern is then not found, and every row is sorted as a whole. Results are the same; nothing is said.
# Output seen (512 rows of 5,120, k = 5; times of two runs over that of the first line):
#   top_k: the k largest
#   top_k and its first column: all sorted, 60 to 90 times the time
#   top_k and its first column by a mask: the k largest
# Until it is right: a mask and a sum in place of the slice, `argmax`, or a slice outside of `jax.jit`.
#
# Fails if this changes. Needs uv, a Python of 3.12 or 3.13 and a network; takes seconds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.10.2 0.12.0.1; do
  uv venv -q --clear -p "${PYTHON:-3.13}" "$folder/venv"
  uv pip install -q -p "$folder/venv/bin/python" "jax==$version"
  JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PROGRAM'
import time

import jax
import jax.numpy as jnp

x = jax.random.normal(jax.random.key(0), (512, 5120))
labels = jnp.arange(512)
print('jax', jax.__version__)


def top_5(x):
  classes = jax.lax.top_k(x, 5)[1]
  return (classes == labels[:, None]).any(axis=1)


def prediction_and_top_5(x):
  classes = jax.lax.top_k(x, 5)[1]
  return classes[:, 0], (classes == labels[:, None]).any(axis=1)


def by_a_mask(x):
  classes = jax.lax.top_k(x, 5)[1]
  first = jnp.where(jnp.arange(5) == 0, classes, 0).sum(axis=1)
  return first, (classes == labels[:, None]).any(axis=1)


seconds = {}
for name, function, is_sorted in (
  ('top_k', top_5, False),
  ('top_k and its first column', prediction_and_top_5, True),
  ('top_k and its first column by a mask', by_a_mask, False),
):
  program = jax.jit(function).lower(x).compile()
  jax.block_until_ready(program(x))
  times = []
  for _ in range(5):
    start = time.process_time()
    jax.block_until_ready(program(x))
    times.append(time.process_time() - start)
  seconds[name] = min(times)
  text = program.as_text()
  assert (' sort(' in text) == is_sorted, name
  assert ('TopK' in text) != is_sorted, name
  ratio = seconds[name] / seconds['top_k']
  print(f'{name}: {"all sorted" if is_sorted else "the k largest"}, {ratio:.1f} of the first')
PROGRAM
done
