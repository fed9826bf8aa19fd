"""A seqio task for t5x's encoder-decoder: spell a number's digits backwards."""

import functools

import seqio
import tensorflow as tf

NAME = 'het_plugin_backwards'
VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def _dataset(split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  numbers = tf.data.Dataset.range(64) if split == 'train' else tf.data.Dataset.range(64, 80)
  return numbers.map(
    lambda n: {
      'inputs': tf.strings.as_string(n * 7919),
      'targets': tf.strings.reduce_join(
        tf.reverse(tf.strings.bytes_split(tf.strings.as_string(n * 7919)), axis=[0])
      ),
    }
  )


@functools.cache
def register():
  feature = seqio.Feature(vocabulary=VOCABULARY, add_eos=True)
  seqio.TaskRegistry.add(
    NAME,
    source=seqio.FunctionDataSource(_dataset, splits=('train', 'validation')),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={'inputs': feature, 'targets': feature},
    metric_fns=[],
  )


register()
