#!/usr/bin/env bash
# seqio: random preprocessing draws the same numbers on every host.
#
# Version: seqio 0.0.20, tensorflow 2.21.0.
# Behaviour: the seeds of `map_over_dataset(num_seeds=...)` are numbered within a shard, and shards begin with the same
#   one. The n-th example of each host gets the crop, the flip or the label noise of the n-th of all others. So a batch of
#   64 hosts has the random numbers of one, and an example gets others as soon as the number of hosts changes: noise that
#   is put on labels is not the same noise on resume.
# Output seen (eight examples, one random number each):
#   1 host: 8 numbers
#   2 hosts: 4 numbers
#   example 1: 415174 with 1 host, 237963 with 2
# Until it is right: stateless random numbers from the number of the example, as het_plugin's tasks have.
#
# Fails if this changes. Needs uv, a Python of 3.11 to 3.13 and a network; takes two minutes, for TensorFlow.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv -q -p "${PYTHON:-3.13}" "$folder/venv"
uv pip install -q -p "$folder/venv/bin/python" seqio==0.0.20 tensorflow==2.21.0 "setuptools<81"
cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 JAX_PLATFORMS=cpu venv/bin/python -W ignore - 2> log <<'PROGRAM'
import seqio
import tensorflow as tf


def examples(split, shuffle_files=False, seed=None):
  return tf.data.Dataset.from_tensor_slices({'x': tf.range(8)[:, None]})


@seqio.map_over_dataset(num_seeds=1)
def add_noise(example, seed):
  noise = tf.random.stateless_uniform([1], seed, 0, 1_000_000, tf.int32)
  return {'x': tf.concat([example['x'], noise], 0)}


seqio.TaskRegistry.add(
  'noisy',
  seqio.FunctionDataSource(examples, splits=['train'], num_input_examples={'train': 8}),
  preprocessors=[add_noise],
  output_features={
    'x': seqio.Feature(seqio.PassThroughVocabulary(10), add_eos=False, dtype=tf.int32)
  },
)


def noise_of_examples(num_hosts):
  noise = {}
  for host in range(num_hosts):
    rows = seqio.get_mixture_or_task('noisy').get_dataset(
      {'x': 2},
      split='train',
      shuffle=False,
      num_epochs=1,
      seed=0,
      shard_info=seqio.ShardInfo(host, num_hosts),
    )
    noise |= {int(row['x'][0]): int(row['x'][1]) for row in rows.as_numpy_iterator()}
  return noise


one = noise_of_examples(1)
two = noise_of_examples(2)
print(f'1 host: {len(set(one.values()))} numbers')
print(f'2 hosts: {len(set(two.values()))} numbers')
print(f'example 1: {one[1]} with 1 host, {two[1]} with 2')
assert len(set(one.values())) == 8
assert len(set(two.values())) == 4
assert all(two[i] == two[i + 1] for i in range(0, 8, 2))
assert one[1] != two[1]
PROGRAM
