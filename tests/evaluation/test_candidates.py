"""Lists of candidates' files, and that they hold the same examples."""

import numpy as np
import pytest

from het_plugin.evaluation import candidates
from het_plugin.evaluation.representations import Representations, write_representations


def test_npy_files_keep_their_labels():
  text = 'a.npz,X.npy,Y.npy,b.safetensors,c.npz:train,Z.npy'
  assert candidates.split_sources(text) == [
    'a.npz',
    'X.npy,Y.npy',
    'b.safetensors',
    'c.npz:train',
    'Z.npy',
  ]


@pytest.fixture
def write(tmp_path):
  def write(name, *, d=3, index=(4, 2, 8), labels=(1, 0, 1), names=None, **provenance):
    features = np.random.default_rng(0).normal(size=(len(index), d))
    labels = np.array(labels, np.int32)[:, None]
    read = Representations(features, labels, np.array(index), names, provenance)
    write_representations(tmp_path / name, read)
    return str(tmp_path / name)

  return write


def test_the_order_of_rows_and_the_width_may_differ(write):
  train = [write('a.npz'), write('b.npz', d=5, index=(8, 4, 2), labels=(1, 1, 0))]
  examples = dict(index=(1, 2), labels=(0, 1))
  test = [write('at.npz', **examples), write('bt.npz', d=5, **examples)]
  candidates.check_representations(train, test)
  candidates.check_representations(train)


@pytest.mark.parametrize(
  'second,words',
  [
    (dict(index=(4, 2, 9)), r'b.npz holds other examples than .*a.npz: 3 and 3, 2 in both'),
    (dict(index=(4, 2), labels=(1, 0)), '2 and 3, 2 in both'),
    (dict(labels=(1, 1, 1)), r'b.npz has other labels than .*a.npz for the same examples'),
  ],
)
def test_candidates_with_other_examples(write, second, words):
  with pytest.raises(ValueError, match=words):
    candidates.check_representations([write('a.npz'), write('b.npz', **second)])


@pytest.mark.parametrize(
  'test,words',
  [
    (dict(d=4), r't.npz has 4 features and .*a.npz 3; they must be equal'),
    (dict(names=('y', 'x')), 'have different class names'),
    (dict(checkpoint='runs/b'), r't.npz is of checkpoint runs/b, but .*a.npz of checkpoint runs/a'),
    (dict(layer='stem'), 'is of layer stem'),
  ],
)
def test_a_test_file_of_another_candidate(write, test, words):
  train = write('a.npz', names=('x', 'y'), checkpoint='runs/a', layer='pre_logits')
  with pytest.raises(ValueError, match=words):
    candidates.check_representations([train], [write('t.npz', **test)])


def test_predictions_for_the_same_examples(tmp_path):
  def write(name, k=2, index=(0, 1), label=(0, 1), link='softmax'):
    path = str(tmp_path / name)
    log_prob = np.full((2, k), -np.log(k))
    np.savez(path, log_prob=log_prob, label=np.array(label), index=index, link=link)
    return path

  first = write('a.npz')
  swapped = write('b.npz', index=(1, 0), label=(1, 0))
  for read in candidates.same_predictions([first, swapped], num_classes=2):
    assert (read.index.tolist(), read.label.tolist()) == ([0, 1], [0, 1])
  for second, words in [
    (write('c.npz', k=3), 'c.npz has 3 classes; the files before it have 2'),
    (write('d.npz', index=(0, 2)), 'd.npz holds other examples than .*a.npz: 2 and 2, 1 in both'),
    (write('e.npz', label=(1, 1)), 'e.npz has other labels'),
    (write('f.npz', link='sigmoid'), "f.npz has link = 'sigmoid'; an ensemble needs softmax"),
    (write('g.npz', label=((0, 1), (1, -1))), 'g.npz: example 0 has 2 labels'),
    (write('h.npz', index=(1, 1)), 'h.npz: index must give each example an id of its own'),
  ]:
    with pytest.raises(ValueError, match=words):
      list(candidates.same_predictions([first, second]))
  with pytest.raises(ValueError, match='a.npz has 2 classes; the files before it have 5'):
    list(candidates.same_predictions([first], num_classes=5))
