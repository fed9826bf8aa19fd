import json

import numpy as np
import pytest

from het_plugin.training import actions
from het_plugin.training.actions import ActionMode


def verdicts(action: actions.BaseAction, values):
  return [action.run(None, {'eval': {'loss': value}}) for value in values]


@pytest.mark.parametrize('value, stop', [(1.0, False), (np.nan, True)])
def test_terminate_on_nan(value, stop):
  action = actions.TerminateOnNanAction(task='train')
  assert action.run(None, {'train': {'loss': value}}) is stop


@pytest.mark.parametrize(
  'settings, values, stop_at',
  [
    ({'mode': 'min', 'patience': 3}, [5, 4, 4, 4], 3),
    ({'mode': 'max', 'patience': 2}, [5, 6, 5], 2),
    ({'mode': 'min', 'patience': 2, 'atol': 1.0}, [5, 4.5], 1),
    ({'mode': 'max', 'patience': 2, 'rtol': 0.5}, [4, 7], None),
    ({'mode': 'min', 'patience': 2}, [5, np.nan], 1),
  ],
)
def test_early_stopping(settings, values, stop_at):
  stops = verdicts(actions.EarlyStoppingAction(('eval', 'loss'), **settings), values)
  assert stops == [i == stop_at for i in range(len(values))]


def test_states_go_back_to_their_actions():
  def make():
    nan = actions.TerminateOnNanAction('eval')
    loss = ('eval', 'loss')
    early = [actions.EarlyStoppingAction(loss, mode, patience=3) for mode in ('min', 'max')]
    return {ActionMode.TRAIN_EVAL: [nan, *early]}

  first = make()
  second = make()
  for action in first[ActionMode.TRAIN_EVAL]:
    verdicts(action, [1.0, 2.0])
  states = actions.get_states(first)
  assert states == {
    'TRAIN_EVAL/1/EarlyStoppingAction': {'watched': ['eval', 'loss', 'min'], 'history': [1.0, 2.0]},
    'TRAIN_EVAL/2/EarlyStoppingAction': {
      'watched': ['eval', 'loss', 'max'],
      'history': [-1.0, -2.0],
    },
  }
  actions.set_states(second, json.loads(json.dumps(states)))
  for made in (first, second):
    assert [verdicts(a, [3.0]) for a in made[ActionMode.TRAIN_EVAL]] == [[False], [True], [False]]
  # A state of another configuration is left out.
  other = {'watched': ['eval', 'precision_at_1', 'max'], 'history': [-0.3]}
  actions.set_states(make(), {'TRAIN_EVAL/0/EarlyStoppingAction': other})
  action = actions.EarlyStoppingAction(('eval', 'loss'), 'min', patience=2)
  action.set_state(other)
  assert verdicts(action, [2.0]) == [False]


def test_what_is_not_evaluated_is_an_error_before_the_first_step():
  known = {'train': (), 'digits': ('loss', 'nll')}
  context = actions.ActionContext(None, None, None, '', 0, metrics=known)
  actions.EarlyStoppingAction(('digits', 'nll'), 'min').setup(context)
  with pytest.raises(ValueError, match="'digits' has no metric 'accuracy'; valid are loss, nll"):
    actions.EarlyStoppingAction(('digits', 'accuracy'), 'max').setup(context)
  with pytest.raises(ValueError, match="metric .*'birds'; .*train or digits"):
    actions.EarlyStoppingAction(('birds', 'nll'), 'min').setup(context)


def test_watching_what_is_not_there_lists_what_is():
  action = actions.TerminateOnNanAction(task='trian')
  with pytest.raises(ValueError, match="'trian'; .*train"):
    action.run(None, {'train': {'loss': 1.0}})
  action = actions.EarlyStoppingAction(('train', 'nll'), 'min')
  with pytest.raises(ValueError, match="'nll'; .*loss, tau"):
    action.run(None, {'train': {'loss': 1.0, 'tau': 1.0}})
