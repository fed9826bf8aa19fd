"""Few-shot linear evaluation of saved representations, or of checkpoints.

    python -m het_plugin.fewshot --train=det/train.npz --test=det/test.npz --shots=1,5,10,25
    python -m het_plugin.fewshot --checkpoint=runs/det --checkpoint=runs/het_xl --datasets=digits

Several runs are compared with the first, paired: --train, --test and --checkpoint may be repeated.
Prints accuracies with standard errors over draws, their averages over data sets and settings (table
22 of Collier et al. 2023), and differences; --json and --html write them too. --results=A.json lays
results of earlier calls side by side.

A run's name is METHOD or METHOD/SETTING; averages are over data sets and the settings of a method.
Files of several data sets make one run under --names=RUN:DATASET,RUN:DATASET.

Exit codes: 0 done; 2 a setting is wrong.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

import gin
from het_plugin import reporting
from het_plugin.config import command_line, distributed, flag_values
from het_plugin.evaluation import fewshot, fewshot_report
from het_plugin.evaluation.fewshot_report import Results
from het_plugin.evaluation.names import check_names, short_names
from het_plugin.evaluation.representations import read_representations

_MODULE = 'het_plugin.fewshot'
_FROM_PROTOCOL = 'from the protocol'
_OF_CHECKPOINTS = ('datasets', 'splits', 'layer', 'batch_size', 'max_train', 'max_test')


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  source = 'F.npz, F.safetensors or X.npy,Y.npy; F.npz:SPLIT where it has several; repeatable.'
  flags.DEFINE_multi_string('train', [], f'Representations that shots are drawn from: {source}')
  flags.DEFINE_multi_string('test', [], f'Representations to measure accuracies on: {source}')
  flags.DEFINE_multi_string(
    'checkpoint', [], "A run's directory, a checkpoint in it, .npz or .safetensors; repeatable."
  )
  flags.DEFINE_list(
    'datasets',
    None,
    'Of checkpoints: tasks, .npz files or folders, TASK or NAME=TASK; by default those that gin '
    'files bind to FewShotAction.datasets, else digits and glyphs_heldout.',
  )
  flags.DEFINE_list(
    'splits', ['train', 'test'], 'Training and test split of --datasets; no comma within.'
  )
  flags.DEFINE_list('names', None, 'Of runs: METHOD or METHOD/SETTING; of files also RUN:DATASET.')
  flags.DEFINE_multi_string(
    'results', [], "An earlier call's --json, shown beside the others; repeatable."
  )
  flags.DEFINE_enum(
    'protocol', 'loo', list(fewshot.PROTOCOLS), 'Combination of the following four; see the docs.'
  )
  flags.DEFINE_enum('classifier', None, fewshot.CLASSIFIERS, f'By default {_FROM_PROTOCOL}.')
  flags.DEFINE_enum('draw', None, fewshot.DRAWS, f'By default {_FROM_PROTOCOL}.')
  flags.DEFINE_string(
    'l2', None, f'A number or {", ".join(fewshot.L2_RULES)}; by default {_FROM_PROTOCOL}.'
  )
  flags.DEFINE_list('shots', ['1', '5', '10', '25'], "Examples a class; 'all' takes every one.")
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'A subset is drawn for each.')
  flags.DEFINE_string('layer', 'pre_logits', "The checkpoints' representation.")
  flags.DEFINE_integer('batch_size', 256, 'Of the extraction, global.', lower_bound=1)
  flags.DEFINE_integer('max_train', None, 'Of --datasets: at most so many.', lower_bound=1)
  flags.DEFINE_integer('max_test', None, 'Of --datasets: at most so many.', lower_bound=1)
  flags.DEFINE_string('json', None, 'Where all results are written.')
  flags.DEFINE_string('html', None, 'Where they are written as a page with plots.')


@dataclasses.dataclass(frozen=True)
class Settings:
  """What the flags ask for: `shots` holds None for all examples."""

  protocol: fewshot.Protocol
  shots: tuple[int | None, ...]
  seeds: tuple[int, ...]


def read_settings() -> Settings:
  """Raises ValueError for flags that do not go together."""
  values = flags.FLAGS
  protocol = fewshot.PROTOCOLS[values.protocol]
  changes = {name: values[name].value for name in ('classifier', 'draw') if values[name].value}
  if values.l2 is not None:
    changes['l2'] = flag_values.positive_or_word('l2', values.l2, fewshot.L2_RULES)
  protocol = dataclasses.replace(protocol, **changes)
  shots = tuple(
    None if s == 'all' else flag_values.integers('shots', [s], least=1)[0] for s in values.shots
  )
  seeds = tuple(flag_values.integers('seeds', values.seeds))
  if len(values.train) != len(values.test):
    raise ValueError(
      f'--train is given {len(values.train)} times and --test {len(values.test)} times; each run '
      'needs both'
    )
  if values.train and values.checkpoint:
    raise ValueError('--train and --checkpoint cannot go together: represent the checkpoints first')
  for name in _OF_CHECKPOINTS:
    if values[name].present and not values.checkpoint:
      raise ValueError(f'--{name} is for --checkpoint, whose representations are computed here')
  if not (values.train or values.checkpoint or values.results):
    raise ValueError('--train and --test, --checkpoint, or --results are needed')
  if len(values.splits) != 2:
    raise ValueError(f'--splits={",".join(values.splits)} must be a training and a test split')
  return Settings(protocol, shots, seeds)


def run_names(paths: Sequence[str]) -> list[str]:
  """--names, or what tells the paths apart.

  Raises:
    ValueError: there are not as many names as runs.
  """
  names = flags.FLAGS.names
  if names is None:
    return short_names(paths)
  if len(names) != len(paths):
    raise ValueError(f'--names={",".join(names)} must be {len(paths)} names')
  return names


def from_files(settings: Settings) -> Results:
  """Evaluates --train and --test, each pair a data set of a run."""
  names = run_names(flags.FLAGS.train)
  runs = {}
  for name, train, test in zip(names, flags.FLAGS.train, flags.FLAGS.test, strict=True):
    halves = [read_representations(source) for source in (train, test)]
    run, colon, dataset = name.partition(':')
    dataset = dataset if colon else halves[0].provenance.get('dataset', 'saved')
    datasets = runs.setdefault(run, {})
    if dataset in datasets:
      raise ValueError(
        f'--train={train}: run {run!r} has the data set {dataset!r} twice: tell them apart with '
        '--names=RUN:DATASET,...'
      )
    datasets[dataset] = tuple(fewshot.Split(x.features, x.label, x.index) for x in halves)
  return {run: evaluate(run, datasets, settings) for run, datasets in runs.items()}


def from_checkpoints(settings: Settings) -> Results:
  """Evaluates --checkpoint; the representations of the data sets are kept in memory."""
  from het_plugin.config import trained_run
  from het_plugin.evaluation import extraction, fewshot_datasets

  names = run_names(flags.FLAGS.checkpoint)
  if len(set(names)) != len(names):
    raise ValueError(f'--names={",".join(names)} must be distinct: each checkpoint is a run')
  results = {}
  for name, checkpoint in zip(names, flags.FLAGS.checkpoint, strict=True):
    run = trained_run.open_run(
      checkpoint, flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths
    )
    datasets = chosen_datasets()
    fewshot.check_settings((1,), settings.seeds, settings.protocol.l2, len(datasets))
    run.partitioner.check_batch_size(flags.FLAGS.batch_size)
    reader = fewshot_datasets.FewShotReader(run.partitioner, run.image_size, flags.FLAGS.batch_size)
    for dataset in datasets:
      reader.check(dataset)
    extractor = extraction.RepresentationExtractor(
      run.model,
      run.partitioner,
      run.param_specs,
      layers=(flags.FLAGS.layer,),
      channels=run.channels,
      pool='mean',
    )
    data = {}
    with reporting.Progress(
      f'{name}: representations', len(datasets), unit='data sets'
    ) as progress:
      for dataset in datasets:
        data[dataset.name] = reader.extract(dataset, extractor, run.params)
        progress.update(1)
    results[name] = evaluate(name, data, settings)
  return results


def chosen_datasets() -> tuple[Any, ...]:
  """The data sets of --datasets, or of the configuration, which is a run's by now."""
  from het_plugin.evaluation import fewshot_action, fewshot_datasets

  if flags.FLAGS.datasets is None:
    bound = gin.get_bindings(fewshot_action.FewShotAction).get('datasets')
    chosen = tuple(bound or fewshot_datasets.DEFAULT_DATASETS)
    bounds = {n: flags.FLAGS[n].value for n in ('max_train', 'max_test') if flags.FLAGS[n].value}
    return tuple(dataclasses.replace(dataset, **bounds) for dataset in chosen)
  train_split, test_split = flags.FLAGS.splits
  chosen = []
  for text in flags.FLAGS.datasets:
    name, equals, task = text.rpartition('=')
    chosen.append(
      fewshot_datasets.FewShotDataset(
        name=name if equals else Path(task).stem or task,
        task=task,
        train_split=train_split,
        test_split=test_split,
        max_train=flags.FLAGS.max_train,
        max_test=flags.FLAGS.max_test,
      )
    )
  check_names(chosen, '--datasets')
  return tuple(chosen)


def evaluate(
  run: str, data: Mapping[str, tuple[fewshot.Split, fewshot.Split]], settings: Settings
) -> dict[str, dict[int, fewshot.FewShotResult]]:
  """{data set: {shots: result}} of a run."""
  most = max(int(np.bincount(train.y).max()) for train, _ in data.values())
  shots = tuple(dict.fromkeys(most if n is None else n for n in settings.shots))
  trials = len(data) * len(shots) * len(fewshot.used_seeds(settings.protocol, settings.seeds))
  with reporting.Progress(run, trials, unit='fits') as progress:
    return fewshot.few_shot_all(
      data,
      settings.protocol,
      shots=shots,
      seeds=settings.seeds,
      on_trial=lambda: progress.update(1),
    )


def read_cells(path: str) -> list[dict[str, Any]]:
  """Those of an earlier call's --json.

  Raises:
    ValueError: the file is none.
  """
  try:
    rows = json.loads(Path(path).read_text())['rows']
    return [dict(row) for row in rows if row['run'] and row['dataset'] and row['shots'] > 0]
  except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
    raise ValueError(f'--results={path} is no --json of this program: {error}') from error


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    settings = read_settings()
    distributed.initialize()
    earlier = [row for path in flags.FLAGS.results for row in read_cells(path)]
    results = {}
    if flags.FLAGS.train:
      results = from_files(settings)
    elif flags.FLAGS.checkpoint:
      results = from_checkpoints(settings)
    rows = [*earlier, *fewshot_report.cells(results)]
    result = {
      'protocol': {'name': flags.FLAGS.protocol, **dataclasses.asdict(settings.protocol)},
      'rows': rows,
      'averages': fewshot_report.averages(rows),
      'differences': fewshot_report.differences(results),
    }
    if jax.process_index() == 0:
      print(f'\n{fewshot_report.text(result)}')
      if flags.FLAGS.json:
        reporting.write_json(result, flags.FLAGS.json)
      if flags.FLAGS.html:
        provenance = reporting.Provenance.of_this_process(_MODULE, {})
        Path(flags.FLAGS.html).parent.mkdir(parents=True, exist_ok=True)
        Path(flags.FLAGS.html).write_text(fewshot_report.html(result, provenance))


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
