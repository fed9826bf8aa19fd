"""Short names of runs, checkpoints and files."""

import pytest

from het_plugin.evaluation.names import named_task, short_names


@pytest.mark.parametrize(
  'sources,names',
  [
    (['runs/a/train.npz', 'runs/b/train.npz'], ['a', 'b']),
    (['x/a/1/t.npz', 'x/a/2/t.npz', 'x/b/1/t.npz'], ['a/1', 'a/2', 'b/1']),
    (['runs/het/train.npz'], ['train']),
    (['runs/het/both.npz:train'], ['both']),
    (['a.npz:train', 'b.npz:train'], ['a', 'b']),
    (['a/X.npy,a/Y.npy', 'b/X.npy,b/Y.npy'], ['a', 'b']),
    (['runs/a/checkpoint_3', 'runs/a/checkpoint_5'], ['a/checkpoint_3', 'a/checkpoint_5']),
    (['runs/a', 'runs/a/checkpoint_5'], ['a', 'a/checkpoint_5']),
    (['runs/A=1,B=2', 'runs/A=1,B=3'], ['A=1,B=2', 'A=1,B=3']),
  ],
)
def test_names_are_what_differs(sources, names):
  assert short_names(sources) == names


def test_names_that_would_be_the_same_are_the_sources():
  for sources in (['d.npz:train', 'd.npz:test'], ['X.npy,Y.npy', 'X.npy,Z.npy'], ['a', 'a/']):
    assert short_names(sources) == sources


def test_the_task_of_a_named_data_set_may_have_an_equals_sign():
  for text in ('tfds:birds/size=64', 'runs/seed=0/size=64.npz'):
    assert named_task(text) == ('size=64', text)
    assert named_task(f'small={text}') == ('small', text)
