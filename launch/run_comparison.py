"""Says where a run that was interrupted differs from the same run that was not.

Both are folders that het_plugin.train made; what launch/recorded_train.py wrote down tells which
examples they were trained on. Nothing may differ where both had the same mesh; where they had not,
floats may by rounding.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

# How long things took is no result.
_TIMES = re.compile(r'(^|/)(timing|goodput)/')
# Shares of examples, which rounding changes by an example that lies on an edge.
_COUNTS = re.compile(r'(^|/)(precision_at_1|ece)$|^fewshot/')
_NAMED = 3  # differences of a kind that are told one by one

Row = tuple[int, int]  # index of the example, checksum of the row
Differences = list[str]


@dataclasses.dataclass(frozen=True)
class Attempt:
  """What the processes did between one start and its end.

  Attributes:
    resumed: the step it went on from, 0 from none; None if it did not come so far.
    steps: the rows of each step that was begun, of all processes together: {step: {row: ...}}.
    conflicts: what cannot be, in words: processes that contradict each other.
  """

  resumed: int | None
  steps: Mapping[int, Mapping[int, Row]]
  conflicts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What was compared, and where it differs.

  Attributes:
    differences: one sentence each; empty where the runs are the same.
    arrays, metric_lines, examples: how many of them agree or were compared.
    largest: the largest absolute difference of floats: 'parameters', 'losses'.
  """

  differences: Differences
  arrays: int
  metric_lines: int
  examples: int
  largest: Mapping[str, float]


def read_events(path: Path) -> list[dict]:
  """Lines of a process; the last one may have been cut short by the kill."""
  lines = path.read_bytes().split(b'\n')
  return [json.loads(line) for line in lines[:-1]]


def read_attempt(folder: Path) -> Attempt:
  """The attempt whose processes wrote into the folder."""
  resumed, steps, conflicts = {}, collections.defaultdict(dict), []
  for path in sorted(folder.glob('process-*.jsonl')):
    begun = set()
    for event in read_events(path):
      if 'at' in event:
        resumed.setdefault(path.stem, event['at'])
      if 'begin' not in event:
        continue
      step = event['begin']
      if step in begun:
        conflicts.append(f'{path.stem} began step {step} twice')
      begun.add(step)
      for row, *seen in zip(event['rows'], event['index'], event['checksum'], strict=True):
        if steps[step].setdefault(row, tuple(seen)) != tuple(seen):
          conflicts.append(f'processes hold different examples in row {row} of step {step}')
  if len(set(resumed.values())) > 1:
    conflicts.append(f'processes resumed from different steps: {resumed}')
  return Attempt(next(iter(resumed.values()), None), dict(steps), tuple(conflicts))


def final_history(attempts: Sequence[Attempt], total_steps: int) -> dict[int, int]:
  """Which attempt took each step that the final parameters come from; {step: its number}.

  Found from the end: the last attempt took all steps after the one it resumed from, which the
  latest attempt before it that came so far had saved, and so on. A step that nobody took is absent.
  """
  history, wanted = {}, total_steps
  for number in reversed(range(len(attempts))):
    attempt = attempts[number]
    if attempt.resumed is None or attempt.resumed >= wanted or wanted not in attempt.steps:
      continue
    taken = range(attempt.resumed + 1, wanted + 1)
    history |= {step: number for step in taken if step in attempt.steps}
    wanted = attempt.resumed
  return history


def compare_examples(reference: Attempt, attempts: Sequence[Attempt]) -> Differences:
  """Where the interrupted run was not trained on each example of the other exactly once, in order.

  What attempts did that is not part of the final history must be the same too.
  """
  found = [f'attempt {i + 1}: {text}' for i, a in enumerate(attempts) for text in a.conflicts]
  wrong = []
  for number, attempt in enumerate(attempts):
    for step, rows in attempt.steps.items():
      expected = reference.steps.get(step, {})
      wrong += [
        f'attempt {number + 1}, step {step}, row {row}: example {seen[0]}, not '
        f'{expected[row][0] if row in expected else "any"}'
        + (' (other content)' if row in expected and seen[0] == expected[row][0] else '')
        for row, seen in sorted(rows.items())
        if expected.get(row) != seen
      ]
  found += _shortened(wrong)
  history = final_history(attempts, max(reference.steps, default=0))
  missing, seen = [], collections.Counter()
  for step, expected in sorted(reference.steps.items()):
    rows = attempts[history[step]].steps[step] if step in history else {}
    seen.update(index for index, _ in rows.values())
    if lost := sorted(set(expected) - set(rows)):
      missing.append(f'step {step} was not trained on its rows {lost}')
  found += _shortened(missing)
  repeated = [f'example {i} was trained on {n} times' for i, n in sorted(seen.items()) if n > 1]
  return found + _shortened(repeated)


def compare_checkpoints(
  reference: Path, run: Path, tolerance: float | None
) -> tuple[Differences, int, float]:
  """Differences of the newest checkpoints of two runs, how many arrays, the largest difference.

  Args:
    reference, run: folders of runs.
    tolerance: of the parameters' and optimizer's floats, absolute; None for bit for bit.
  """
  from het_plugin.training import checkpoint_reader

  folders = [checkpoint_reader.find(folder) for folder in (reference, run)]
  if folders[0].name != folders[1].name:
    return [f'the newest checkpoint is {folders[1].name}, not {folders[0].name}'], 0, 0.0
  found, largest = [], 0.0
  states = [checkpoint_reader.read_dataset_state(folder) for folder in folders]
  if states[0] != states[1]:
    found.append(f'{folders[0].name}: the input position is {states[1]}, not {states[0]}')
  expected, got = map(checkpoint_reader.read_arrays, folders)
  for name in sorted(expected.keys() ^ got.keys()):
    found.append(f'{folders[0].name}: {name} is in one of the two only')
  different = []
  for name in sorted(expected.keys() & got.keys()):
    a, b = expected[name], got[name]
    if a.shape != b.shape or a.dtype != b.dtype:
      different.append(f'{name} is {b.dtype} {b.shape}, not {a.dtype} {a.shape}')
    elif a.tobytes() != b.tobytes():
      distance = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
      largest = max(largest, distance)
      exact = tolerance is None or not np.issubdtype(a.dtype, np.floating)
      if exact or not distance <= tolerance:  # NaN differs
        bits = int(np.count_nonzero(_bytes(a) != _bytes(b)))
        different.append(f'{name} differs in {bits} of {a.nbytes} bytes, by at most {distance:.3g}')
  found += _shortened([f'{folders[0].name}: {text}' for text in different])
  return found, len(expected), largest


def compare_metrics(
  reference: Path, run: Path, tolerance: float | None
) -> tuple[Differences, int, float]:
  """Differences of two runs' metrics.jsonl, how many lines, the largest difference of a loss.

  Lines have the same steps and names in the same order, each once; those of times do not count.

  Args:
    reference, run: folders of runs.
    tolerance: of floats, relative where they are above 1; shares of examples may differ then. None
      for bit for bit.
  """
  expected, got = (_metric_lines(folder / 'metrics.jsonl') for folder in (reference, run))
  places = [[(step, *values) for step, values in lines] for lines in (expected, got)]
  counts = [collections.Counter(lines) for lines in places]
  found = [
    f'metrics.jsonl: step {place[0]} has {", ".join(place[1:])} {counts[1][place]} times, not '
    f'{counts[0][place]}'
    for place in sorted(counts[0].keys() | counts[1].keys())
    if counts[0][place] != counts[1][place]
  ]
  if found:
    return _shortened(found), len(expected), 0.0
  if places[0] != places[1]:
    found.append('metrics.jsonl: the lines are not in the same order')
  different, largest = [], 0.0
  by_place = dict(zip(places[1], (values for _, values in got), strict=True))
  for place, (step, values) in zip(places[0], expected, strict=True):
    for name, a in values.items():
      b = by_place[place][name]
      if a == b or (tolerance is not None and _COUNTS.search(name)):
        continue
      distance = abs(a - b) if a is not None and b is not None else float('nan')
      largest = max(largest, distance)
      if tolerance is None or not distance <= tolerance * max(1.0, abs(a or 0.0)):
        different.append(f'metrics.jsonl: step {step} has {name}={b}, not {a}')
  return found + _shortened(different), len(expected), largest


def compare(
  reference: Path,
  run: Path,
  reference_records: Path,
  run_records: Sequence[Path],
  tolerance: float | None = None,
) -> Comparison:
  """Compares checkpoints, metrics and examples of two finished runs.

  Args:
    reference: folder of the run that was not interrupted.
    run: folder of the other.
    reference_records: what `recorded_train` wrote of the first.
    run_records: the same of the second, a folder for each of its starts, in their order.
    tolerance: None where the meshes were the same, and nothing may differ.
  """
  expected, attempts = read_attempt(reference_records), list(map(read_attempt, run_records))
  in_checkpoints, arrays, of_parameters = compare_checkpoints(reference, run, tolerance)
  in_metrics, metric_lines, of_metrics = compare_metrics(reference, run, tolerance)
  return Comparison(
    differences=in_checkpoints + in_metrics + compare_examples(expected, attempts),
    arrays=arrays,
    metric_lines=metric_lines,
    examples=sum(map(len, expected.steps.values())),
    largest={'parameters': of_parameters, 'metrics': of_metrics},
  )


def _metric_lines(path: Path) -> list[tuple[int, dict[str, float | None]]]:
  """(step, {name: value}) of the lines, without times; lines of times alone are left out."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  lines = [(row.pop('step'), row) for row in rows]
  kept = [(step, {k: v for k, v in row.items() if not _TIMES.search(k)}) for step, row in lines]
  return [(step, values) for step, values in kept if values]


def _bytes(x: np.ndarray) -> np.ndarray:
  return np.frombuffer(x.tobytes(), np.uint8)


def _shortened(texts: Sequence[str]) -> Differences:
  more = [f'... and {len(texts) - _NAMED} more of this kind'] if len(texts) > _NAMED else []
  return [*texts[:_NAMED], *more]
