"""Zero-shot classification and retrieval of contrastive checkpoints.

    python -m het_plugin.zeroshot --checkpoint=runs/lit_het_xl --dataset=glyphs_heldout
    python -m het_plugin.zeroshot --gin_file=gin/evaluation/zeroshot_paper.gin \\
      --group=DET=runs/det_0,runs/det_1,runs/det_2 --group=HET-XL=runs/xl_0,runs/xl_1,runs/xl_2

prints top-1 and top-5 accuracy of data sets with class names, recall at 1, 5 and 10 both ways of
those with captions. --checkpoint may be repeated. A --group is a name and the checkpoints of
several seeds: its mean and standard error are printed, and of each further group the p-value
against the first (table 6 of Collier et al. 2023).

Exit codes: 0 done; 2 a setting is wrong.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

import gin
from het_plugin import data, reporting
from het_plugin.config import command_line, distributed, trained_run
from het_plugin.evaluation import comparison, zeroshot
from het_plugin.evaluation.names import check_names, short_names

# What a data set's own settings give way to.
_CHANGES = (
  'split',
  'templates',
  'class_names',
  'lower',
  'max_labels',
  'max_examples',
  'resize',
  'identical_captions_right',
)
_SPLITS = ('test', 'validation')  # taken where none is named, the first that there is


def define_flags() -> None:
  command_line.define_flags()
  distributed.define_flags()
  flags.DEFINE_multi_string(
    'checkpoint', [], "A run's directory, or a checkpoint in it; repeatable."
  )
  flags.DEFINE_multi_string(
    'group', [], 'NAME=DIR,DIR,...: checkpoints that differ by their seed; repeatable.'
  )
  flags.DEFINE_list('names', None, 'Of the --checkpoint runs; else what tells their paths apart.')
  flags.DEFINE_list(
    'dataset',
    None,
    'By comma: names of data sets that gin files bind to ZeroShotAction.datasets, tasks, or '
    'NAME=TASK; by default all that are bound, else glyphs_heldout and glyphs_core.',
  )
  flags.DEFINE_string(
    'split', None, f'A split or a slice of one; of a task by default {" or ".join(_SPLITS)}.'
  )
  flags.DEFINE_string(
    'templates',
    None,
    "What is said about a class: none, photo, ensemble, a text with '{}', or a file of such lines.",
  )
  flags.DEFINE_string(
    'class_names', None, "A file with a name a line, in the labels' order; else the task's names."
  )
  flags.DEFINE_bool('lower', None, 'Whether class names are lower-cased.')
  flags.DEFINE_integer('max_labels', None, 'Most labels an image, of a multi-label task.')
  flags.DEFINE_bool(
    'identical_captions_right',
    None,
    'Whether a caption is right for all images that have its text.',
  )
  flags.DEFINE_integer(
    'max_examples', None, 'At most so many, a fixed random choice.', lower_bound=1
  )
  flags.DEFINE_enum('resize', None, ['aspect', 'squash'], 'How photographs are made square.')
  flags.DEFINE_integer(
    'samples',
    0,
    'Ranks classes by their probability under so many samples of the noise; 0 by the deterministic '
    'embeddings.',
    lower_bound=0,
  )
  flags.DEFINE_integer('batch_size', 256, 'Of images and texts, global.', lower_bound=1)
  flags.DEFINE_string('json', None, 'Where all results are written.')


@dataclasses.dataclass(frozen=True)
class Run:
  """A checkpoint to evaluate; `group` is None outside of groups."""

  name: str
  checkpoint: str
  group: str | None


def chosen_runs() -> list[Run]:
  """What --checkpoint and --group name.

  Raises:
    ValueError: they name nothing, or two things alike.
  """
  alone, names = flags.FLAGS.checkpoint, flags.FLAGS.names
  if names is not None and len(names) != len(alone):
    raise ValueError(f'--names={",".join(names)} must be {len(alone)} names, one a --checkpoint')
  pairs = zip(names or (short_names(alone) if alone else ()), alone, strict=True)
  runs = [Run(name, path, None) for name, path in pairs]
  for text in flags.FLAGS.group:
    group, equals, paths = text.partition('=')
    paths = paths.split(',')
    if not equals or not group or not all(paths):
      raise ValueError(f'--group={text} must be NAME=DIR,DIR,...')
    if len(set(paths)) != len(paths):
      raise ValueError(f'--group={text} has a checkpoint twice: a seed counts once')
    runs += [
      Run(f'{group}/{name}', path, group)
      for name, path in zip(short_names(paths), paths, strict=True)
    ]
  if not runs:
    raise ValueError('--checkpoint or --group is needed')
  groups = [text.partition('=')[0] for text in flags.FLAGS.group]
  for what, given in (('groups', groups), ('runs', [run.name for run in runs])):
    if len(set(given)) != len(given):
      raise ValueError(f'the {what} {",".join(given)} must have distinct names')
  return runs


def chosen_datasets() -> tuple[Any, ...]:
  """The data sets of --dataset, or of the configuration, which is a run's by now.

  Raises:
    ValueError: two of one name, or a task that must be told which split.
  """
  from het_plugin.evaluation import zeroshot_action, zeroshot_datasets

  bound = gin.get_bindings(zeroshot_action.ZeroShotAction).get('datasets')
  known = {dataset.name: dataset for dataset in bound or zeroshot_datasets.DEFAULT_DATASETS}
  chosen = []
  for text in flags.FLAGS.dataset if flags.FLAGS.dataset is not None else known:
    if text in known:
      chosen.append(known[text])
      continue
    name, equals, task = text.rpartition('=')
    split = flags.FLAGS.split or default_split(task)
    name = name if equals else Path(task).stem or task
    chosen.append(zeroshot_datasets.ZeroShotDataset(name, task, split))
  changes = {name: flags.FLAGS[name].value for name in _CHANGES}
  changes = {name: value for name, value in changes.items() if value is not None}
  chosen = tuple(dataclasses.replace(dataset, **changes) for dataset in chosen)
  check_names(chosen, '--dataset')
  return chosen


def default_split(task: str) -> str:
  """The split to evaluate a task on where none is named.

  Raises:
    ValueError: no such task, or it has none of the usual ones.
  """
  splits = data.task_info(task).splits
  if not (usual := [split for split in _SPLITS if split in splits]):
    raise ValueError(f'--split is needed: {task} has {", ".join(sorted(splits))}')
  return usual[0]


def evaluate(run: Run) -> dict[str, tuple[Any, dict[str, Any]]]:
  """{name of a data set: (the data set, its row of results)} of a run."""
  from het_plugin.evaluation import zeroshot_datasets
  from het_plugin.training import train

  opened = trained_run.open_run(
    run.checkpoint, flags.FLAGS.gin_file, flags.FLAGS.gin_bindings, flags.FLAGS.gin_search_paths
  )
  zeroshot_datasets.check_model(opened.model, flags.FLAGS.samples)
  evaluator = zeroshot_datasets.ZeroShotEvaluator(
    opened.model,
    opened.partitioner,
    opened.param_specs,
    zeroshot_datasets.run_tokenizer(gin.get_bindings(train.train)['train_dataset_cfg']),
    image_size=opened.image_size,
    channels=opened.channels,
    batch_size=flags.FLAGS.batch_size,
    num_samples=flags.FLAGS.samples,
  )
  datasets = chosen_datasets()
  sizes = [evaluator.check(dataset) for dataset in datasets]
  found = {}
  for dataset, size in zip(datasets, sizes, strict=True):
    with reporting.Progress(
      f'{run.name}: {dataset.name}', size, shown=jax.process_index() == 0
    ) as progress:
      result = evaluator(dataset, opened.params, progress.update)
    row = {'run': run.name, 'group': run.group, 'dataset': dataset.name}
    about = {'checkpoint': opened.checkpoint, 'step': opened.step, 'samples': flags.FLAGS.samples}
    row |= {**result.record(), **about, **dataclasses.asdict(dataset), 'scalars': result.scalars()}
    found[dataset.name] = dataset, row
  return found


def evaluate_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
  """A row for each run and data set.

  Raises:
    ValueError: runs define a data set of one name in several ways.
  """
  rows, datasets = [], {}
  for run in runs:
    for name, (dataset, row) in evaluate(run).items():
      if datasets.setdefault(name, dataset) != dataset:
        raise ValueError(
          f'{run.name}: the data set {name!r} is {dataset}; in a run before it is '
          f'{datasets[name]}: bind ZeroShotAction.datasets for all by --gin_file'
        )
      rows.append(row)
  return rows


def groups_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Mean and standard error of each metric over each group, and p against the first group."""
  values: dict[tuple[str, str], dict[str, list[float]]] = {}
  for row in rows:
    if row['group'] is not None:
      for metric, value in row['scalars'].items():
        by_group = values.setdefault((row['dataset'], metric), {})
        by_group.setdefault(row['group'], []).append(value)
  found = []
  for (dataset, metric), by_group in values.items():
    (first, baseline), *_ = by_group.items()
    for group, of_runs in by_group.items():
      mean = dataclasses.asdict(comparison.group_mean(of_runs))
      p = None if group == first else comparison.welch_p(of_runs, baseline)
      found.append(
        {'dataset': dataset, 'metric': metric, 'group': group, **mean, 'baseline': first, 'p': p}
      )
  return found


def text(rows: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> str:
  """All tables and what to know about them."""
  blocks = []
  for what, metrics in (
    ('Zero-shot classification', ('top1', 'top5')),
    (
      'Retrieval: recall at k',
      tuple(
        f'{way}/recall{k}' for way in ('image_to_text', 'text_to_image') for k in zeroshot.RECALL_AT
      ),
    ),
  ):
    lines = [
      (row['run'], row['dataset'], *(f'{row["scalars"][metric]:.4f}' for metric in metrics))
      for row in rows
      if set(metrics) <= set(row['scalars'])
    ]
    if lines:
      titles = tuple(m.replace('_to_', '->').replace('/recall', ' @') for m in metrics)
      table = reporting.Table(what, ('run', 'data set', *titles), lines)
      blocks.append(reporting.plain_table(table))
  if groups:
    lines = [
      (
        group['group'],
        group['dataset'],
        group['metric'],
        f'{group["mean"]:.4f}' + ('' if group['stderr'] is None else f' ±{group["stderr"]:.4f}'),
        str(group['num_runs']),
        '–' if group['p'] is None else f'{group["p"]:.3g}',
      )
      for group in groups
    ]
    header = ('group', 'data set', 'metric', 'mean', 'runs', 'p')
    caption = f"Groups, p of Welch's t-test against {groups[0]['baseline']}"
    blocks.append(reporting.plain_table(reporting.Table(caption, header, lines)))
  alike = {
    row['dataset']: number
    for row in rows
    if (number := row.get('classes_alike', 0) or row.get('captions_alike', 0))
  }
  if alike:
    counts = ', '.join(f'{name} {number}' for name, number in alike.items())
    blocks.append(f'Classes or captions of the same words as one before: {counts}.')
  return '\n\n'.join(blocks)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')
  with command_line.one_sentence_errors():
    runs = chosen_runs()
    distributed.initialize()
    rows = evaluate_all(runs)
    groups = groups_of(rows)
    if jax.process_index() == 0:
      print(f'\n{text(rows, groups)}')
      if flags.FLAGS.json:
        rows = [{k: v for k, v in row.items() if k != 'scalars'} for row in rows]
        alone = rows[0] if len(rows) == 1 else {}
        reporting.write_json({**alone, 'rows': rows, 'groups': groups}, flags.FLAGS.json)


if __name__ == '__main__':
  define_flags()
  command_line.run(main)
