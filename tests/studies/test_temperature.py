"""Methods to choose tau: which training is chosen, on what, and at which cost."""

import dataclasses
import json
import math

import pytest

import gin
from het_plugin.config import registry
from het_plugin.experiments import trainings
from studies.temperature import methods

RUN = 'studies/temperature/gin/temperature_glyphs.gin'


@pytest.fixture(autouse=True)
def trainer():
  registry.register_trainer()


@pytest.fixture
def study(tmp_path, monkeypatch):
  """A study whose trainings are a formula; `study.trained` lists them."""
  base = trainings.Training([RUN])
  study = methods.Study(base, tmp_path, 1, grid=(0.1, 0.4, 3.0), rounds=2, trials_per_round=2)
  trained = []

  def fixed(self, tau, split):
    trained.append((tau, split))
    distance = abs(math.log(tau / 0.5))
    # tau 0.1 is the best on the test set, and 3 fails
    validation = math.inf if tau == 3.0 else 1 + distance
    nll = math.inf if tau == 3.0 else 2 - distance
    return methods.Trained(f'{split}_{tau}', tau, validation, nll, 0.5, 400, 10.0)

  monkeypatch.setattr(methods.Study, '_fixed', fixed)
  return study, trained


def test_methods_are_rows_of_the_table_in_its_order():
  rows = methods.parse_methods(['all'])
  assert len(rows) == 13 and rows == list(methods.ROWS)
  got = methods.parse_methods(['simple_training', 'luketina', 'grid:retrain'])
  shares = ['luketina:12.5%', 'luketina:25%']
  assert got == ['grid:retrain', 'luketina:validation', *shares, 'simple_training']
  with pytest.raises(ValueError, match='--method=luketina:50% .* all, grid'):
    methods.parse_methods(['luketina:50%'])


def test_grid_search_chooses_by_validation_and_two_folds_by_test(study):
  study, trained = study
  got = study.outcome('grid:validation')
  assert (got['tau'], got['trainings'], got['validation_nll']) == (0.4, 3, 1 + math.log(1.25))
  assert {split for _, split in trained} == {'TRAIN_SPLIT'}
  trained.clear()
  got = study.outcome('grid:2folds')
  assert got['tau'] == 0.1 and got['validation_nll'] is None
  assert {split for _, split in trained} == {'FULL_SPLIT'}
  trained.clear()
  got = study.outcome('grid:retrain')
  assert trained[-1] == (0.4, 'FULL_SPLIT') and got['chosen'] == 'FULL_SPLIT_0.4'
  row = {'row': 'grid:retrain', 'head': 'x', 'single training': 'no', 'replications': [got]}
  retrained, *searched = got['trials']
  retrained['nll'] = 9.0  # it saw other data than its search
  expected = {trial['tau']: trial['nll'] for trial in searched}
  assert dict(zip(*methods._tau_nll([row])['x'], strict=True)) == expected
  assert got['steps'] == 4 * 400 and got['validation_nll'] is None
  with pytest.raises(ValueError, match=' 1 trainings of Grid search .*nonfinite'):
    dataclasses.replace(study, grid=(3.0,)).outcome('grid:validation')


def test_bayesian_optimization_goes_on_from_its_record(study, monkeypatch, tmp_path):
  study, trained = study
  asked = []

  def suggest(taus, nlls, count, seed):
    asked.append(dict(zip(taus, nlls, strict=True)))
    return [3.0, 0.6] if not taus else [0.5, 0.2]

  monkeypatch.setattr(methods, 'suggest', suggest)
  got = study.outcome('bayesian:validation')
  assert got['tau'] == 0.5 and [tau for tau, _ in trained] == [3.0, 0.6, 0.5, 0.2]
  assert not asked[0] and asked[1][3.0] == math.inf and asked[1][0.6] < 1.2
  study.outcome('bayesian:retrain')
  assert len(asked) == 2 and trained[-1] == (0.5, 'FULL_SPLIT')
  record = tmp_path / 'bayesian_train_split.json'
  assert json.loads(record.read_text()) == [3.0, 0.6, 0.5, 0.2]
  record.write_text('[3.0, 0.6]')  # interrupted in the second round
  study.outcome('bayesian:validation')
  assert len(asked) == 3 and asked[2] == asked[1]
  study.outcome('bayesian:2folds')
  assert len(asked) == 5 and asked[4][0.6] > 1.5  # told the NLL of the test set


@pytest.mark.parametrize(
  'row, steps, every, split',
  [
    ('luketina:validation', 400, 5, 'train[:87.5%]'),
    ('luketina:12.5%', 450, 8, 'train'),
    ('simple_gradient:25%', 500, 4, 'train'),
    ('simple_training', 400, None, 'train'),
    ('fixed', 400, None, 'train[:87.5%]'),
  ],
)
def test_what_a_method_trains(tmp_path, monkeypatch, row, steps, every, split):
  """By the configuration that each run would be trained with."""
  base = trainings.Training([RUN], ['TRAIN_STEPS = 400'])
  study = methods.Study(base, tmp_path, 2)
  study.check_used(['grid:validation' if row == 'fixed' else row])  # though 400 becomes 450

  def complete(run, folder):
    run.parse(folder)
    raise StopIteration

  monkeypatch.setattr(trainings, 'complete', complete)
  with pytest.raises(StopIteration):
    study._fixed(0.05, 'TRAIN_SPLIT') if row == 'fixed' else study.outcome(row)
  settings = gin.get_bindings('train')
  assert settings['total_steps'] == steps and settings['random_seed'] == 2
  cfg = settings['train_dataset_cfg']
  assert getattr(cfg, 'train', cfg).split == split and getattr(cfg, 'train', cfg).augment
  assert settings['infer_eval_dataset_cfg'].split == 'test[:50%]'
  assert settings['train_eval_dataset_cfg'].split == 'train[87.5%:]'
  if every:
    held_out = gin.get_bindings('HeldOutTemperatureTrainer')
    estimator = 'luketina' if row.startswith('luketina') else 'simple'
    assert held_out == {'estimator': estimator, 'held_out_every': every}
  assert hasattr(cfg, 'held_out') == (row == 'luketina:validation')
  model = settings['model']
  assert model.head.temperature.tau_0 == pytest.approx(0.05 if row == 'fixed' else 2.525)
  params = {'kernel': 0.0, 'temperature': {'t': 0.0}}
  state = model.optimizer_def.optax_optimizer.init(params)
  assert hasattr(state, 'inner_states') == (row != 'simple_training')


def test_rows_are_means_over_replications():
  def outcome(nll):
    same = {'precision_at_1': 0.5, 'tau': 0.4, 'validation_nll': None, 'ms_per_step': 10.0}
    return {'nll': nll, **same, 'trainings': 2, 'steps': 800}

  searched = [outcome(1.0), outcome(1.5), outcome(2.0)]
  simple = [outcome(4.0), outcome(4.0), outcome(4.1)]
  first, second = methods.table({'grid:2folds': searched, 'simple_training': simple})
  assert first['nll'] == 1.5 and first['stderr']['nll'] == pytest.approx(0.5 / math.sqrt(3))
  assert first['trainings'] == 2 and first['steps'] == 800 and first['validation_nll'] is None
  assert first['welch_p'] < 0.05 and second['welch_p'] is None
  assert 'welch_p' not in methods.table({'grid:2folds': searched})[0]


def test_suggestions_spread_first_and_then_close_in_on_the_best():
  first = methods.suggest([], [], 5, 0)
  assert len(set(first)) == 5 and all(0.05 <= tau <= 5.0 for tau in first)

  def nll(tau):  # lowest at 0.4
    return math.inf if tau > 3 else 1.0 + math.log(tau / 0.4) ** 2

  taus = list(first)
  for _ in range(3):
    taus += methods.suggest(taus, [nll(tau) for tau in taus], 5, 0)
  assert min(abs(math.log(tau / 0.4)) for tau in taus) < 0.05
  assert len(set(taus)) == len(taus)
  assert methods.suggest(first, [math.inf] * 5, 5, 0) != first  # all failed: others
