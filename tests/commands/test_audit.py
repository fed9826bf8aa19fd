"""python -m het_plugin.audit, on labels that are wrong in three cases of ten."""

import base64
import csv
import dataclasses
import html
import io
import json
import re
import shutil

import numpy as np
import pytest
from absl import flags
from PIL import Image

from het_plugin import rows as rows_lib
from het_plugin.commands import audit, noise_test, probe
from het_plugin.data import image_folder, tasks
from het_plugin.estimators.settings import GridSettings

FAST = ['--folds=2', '--C=10', '--max_iter=40']
HET_XL = ['--head=het_xl', '--C_noise=1', '--num_factors=1', '--rounds=2']


@pytest.fixture(scope='module')
def noisy(tmp_path_factory):
  """A file of rows whose truth is linear in the features, and the truth."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(900, 6)).astype(np.float32)
  truth = x[:, :3].argmax(axis=1)
  label = np.where(rng.random(900) < 0.3, (truth + 1) % 3, truth)
  path = tmp_path_factory.mktemp('audit') / 'train.npz'
  index = np.arange(900) + 7
  names = ('cat', 'dog', 'owl')
  rows = rows_lib.Rows({'features': x}, np.int32(label)[:, None], index, class_names=names)
  rows_lib.write(path, rows)
  return path, truth, label


@pytest.mark.slow
def test_wrong_labels_are_listed_first_and_corrected_in_a_copy(noisy, run_main, tmp_path):
  path, truth, label = noisy
  files = {name: tmp_path / f'a.{name}' for name in ('csv', 'json', 'html')}
  fixed = tmp_path / 'fixed.npz'
  said = run_main(
    audit,
    f'--train={path}',
    f'--suggest={fixed}',
    *FAST,
    *(f'--{name}={file}' for name, file in files.items()),
  )
  found = json.loads(files['json'].read_text())
  assert 'are wrong' in said and 'owl' in said
  assert 0.2 < found['share'] < 0.4 and sum(found['counts'].values()) == 900
  rows = found['rows']
  assert [list(row) for row in rows[:1]] == [
    [
      'index',
      'label',
      'probability',
      'wrong',
      'suggested',
      'kind',
      'label_name',
      'suggested_name',
    ]
  ]
  assert all(row['label_name'] == ('cat', 'dog', 'owl')[row['label']] for row in rows)
  order = np.array([row['index'] - 7 for row in rows])
  is_wrong = (label != truth)[order]
  assert is_wrong[:150].mean() > 0.85 and is_wrong[-300:].mean() < 0.1
  assert {(pair['truth'], pair['label']) for pair in found['pairs'][:3]} == {(0, 1), (1, 2), (2, 0)}
  with files['csv'].open() as file:
    listed = list(csv.DictReader(file))
  assert [[*map(str, row.values())] for row in rows] == [[*row.values()] for row in listed]
  corrected = rows_lib.read(str(fixed))
  assert (corrected.label == truth).mean() > (label == truth).mean() + 0.15
  np.testing.assert_array_equal(rows_lib.read(str(path)).label, label)  # the source is as it was
  np.testing.assert_array_equal(corrected.features, rows_lib.read(str(path)).features)
  page = files['html'].read_text()
  assert 'Labels that people confuse' in page and '<img' not in page


def pictures(page):
  """{caption: [(image, name, lines of text)]} of the galleries of a page."""
  found = {}
  for caption, gallery in re.findall(r'<figcaption>(.*?)</figcaption><ul>(.*?)</ul>', page, re.S):
    items = re.findall(r'base64,([^"]*)" alt="([^"]*)"[^>]*>([^<]*)<span>', gallery)
    found[html.unescape(caption)] = [
      (np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))), name, html.unescape(text))
      for png, name, text in items
    ]
  return found


@pytest.mark.slow
def test_the_page_shows_the_images_of_the_rows(noisy, run_main, tmp_path):
  """Images say which example they are; labels of the task are the truth."""
  path, truth, label = noisy
  number = np.arange(1000)  # ids are 7 to 906
  images = np.zeros((1000, 4, 4), np.uint8)
  images[:, 0, 0] = number // 256
  images[:, 0, 1] = number % 256
  images[:, 2:] = 255
  task = tmp_path / 'images.npz'
  page = tmp_path / 'a.html'
  labels = np.zeros(1000, int)
  split = np.array(['train'] * 1000)
  labels[7:907] = truth
  np.savez(task, image=images, label=labels, split=split, class_name=['cat', 'dog', 'owl'])
  rows = rows_lib.read(str(path))
  sized = tmp_path / 'sized.npz'
  rows_lib.write(sized, dataclasses.replace(rows, provenance={'image_size': 4}))
  where = f'--json={tmp_path / "a.json"}', f'--html={page}'
  said = run_main(audit, f'--train={sized}', f'--dataset={task}', *where, *FAST, *HET_XL)
  compared = np.linspace(0, 899, 100).astype(int)
  other = int((label != truth)[compared].sum())
  assert f'Of 100 rows that were compared, {other} have another label in npz:{task}. If' in said
  listed = json.loads((tmp_path / 'a.json').read_text())
  by_index = {row['index']: row for row in listed['rows']}
  galleries = pictures(page.read_text())
  assert 5 <= len(galleries) <= 8  # the worst, the ambiguous, and pairs
  for image, name, text in sum(galleries.values(), []):
    index = int(re.search(r'#(\d+)$', text)[1])
    assert 256 * int(image[0, 0]) + int(image[0, 1]) == index and image.shape == (4, 4)
    assert image[2:].min() == 255 and name == f'npz:{task}[{index}]' == by_index[index]['name']
    assert text.startswith(by_index[index]['label_name']) or text[0] in '01'
  worst, ambiguous, *pairs = galleries.items()
  shown = [int(text.partition('#')[2]) for *_, text in worst[1]]
  assert shown == [row['index'] for row in listed['rows'][: len(shown)]] and len(shown) == 24
  first = listed['rows'][0]
  assert worst[1][0][2].startswith(f'{first["label_name"]}\n→ {first["suggested_name"]}\n')
  others = sum(label[i - 7] != truth[i - 7] for i in shown)
  assert others > 20 and f'{others} of 24 have another label in npz:{task}' in worst[0]
  assert all(by_index[int(x[2].partition('#')[2])]['kind'] == 'ambiguous' for x in ambiguous[1])
  for caption, items in pairs:
    names = re.match('Truth (cat|dog|owl), label (cat|dog|owl):', caption).groups()
    for *_, text in items:
      row = by_index[int(text.partition('#')[2])]
      assert (row['suggested_name'], row['label_name'], row['kind']) == (*names, 'wrong')


@pytest.mark.slow
def test_votes_and_probabilities_of_other_programs(noisy, run_main, tmp_path):
  """The consensus is audited; probabilities that are written and read back give the same audit."""
  path, truth, label = noisy
  rng = np.random.default_rng(1)
  people = np.stack([label, label, (label + rng.integers(1, 3, 900)) % 3], axis=1)
  people[::2, 1:] = -1  # one vote
  votes = tmp_path / 'votes.npz'
  rows = dataclasses.replace(rows_lib.read(str(path)), labels=people.astype(np.int32))
  rows_lib.write(votes, rows)
  found = {}
  probs = tmp_path / 'p.npy'
  for name, arguments in {
    'labels': [f'--train={path}', *FAST],
    'votes': [f'--train={votes}', f'--write_pred_probs={probs}', *FAST],
    'read': [f'--train={votes}', f'--pred_probs={probs}'],
  }.items():
    said = run_main(audit, *arguments, f'--json={tmp_path / name}.json')
    found[name] = json.loads((tmp_path / f'{name}.json').read_text())
    assert ('450 of 900 examples have several labels, which are votes' in said) == (
      name != 'labels'
    )
  assert found['votes']['rows'] == found['labels']['rows']
  p = np.load(probs)
  assert p.shape == (900, 3) and (p.argmax(axis=1) == truth).mean() > 0.85
  assert found['read']['share'] == pytest.approx(found['votes']['share'], rel=1e-6)
  assert found['read']['rows'][:20] == found['votes']['rows'][:20]
  # A file of ours may be replaced, any other one not.
  run_main(audit, f'--train={votes}', f'--write_pred_probs={probs}', *FAST, '--rounds=1')
  np.save(probs, p)
  said = run_main(audit, f'--train={votes}', f'--write_pred_probs={probs}', code=2)
  assert 'p.npy is there, and no command has written it' in said


@pytest.mark.slow
def test_a_training_of_the_folder_takes_the_suggested_labels(noisy, run_main, tmp_path):
  path, truth, label = noisy
  root = tmp_path / 'birds'
  names = ('cat', 'dog', 'owl')
  order = np.argsort(label, kind='stable')  # of the files of the folder
  for number, i in enumerate(order):
    file = root / 'train' / names[label[i]] / f'{number:03}.png'
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (4, 3), (int(i) % 256, int(i) // 256, 0)).save(file)
  rows = rows_lib.read(str(path)).take(order)
  features = tmp_path / 'features.npz'
  rows_lib.write(features, dataclasses.replace(rows, index=np.arange(900)))
  csv_file = tmp_path / 'audit.csv'
  page = tmp_path / 'a.html'
  table = root / 'labels.csv'
  command = (
    audit,
    f'--train={features}',
    f'--dataset=image_folder:{root}',
    f'--csv={csv_file}',
    f'--suggest={table}',
    f'--html={page}',
    *FAST,
  )
  run_main(*command)
  source = image_folder.ImageFolderSource(str(root))
  _, labels = source.read('train', np.arange(900), 4, 0)
  corrected = labels['label'][:, 0]
  assert (corrected == truth[order]).mean() > (label == truth).mean() + 0.15
  with csv_file.open() as file:
    by_name = {row['name']: row for row in csv.DictReader(file)}
  with table.open() as file:
    for row in csv.DictReader(file):
      listed = by_name[row['file']]
      assert row['file'].startswith('train/') and row['was'] == listed['label_name']
      is_wrong = listed['kind'] == 'wrong'
      assert row['label'] == listed['suggested_name' if is_wrong else 'label_name']
  shown = sum(pictures(page.read_text()).values(), [])
  assert shown and all(image.shape == (3, 4, 3) and name in by_name for image, name, _ in shown)
  run_main(*command)  # its own files are replaced


@pytest.mark.slow
def test_a_run_is_represented_and_its_images_shown(digits_det_run, run_main, tmp_path):
  run_dir, _ = digits_det_run
  page = tmp_path / 'a.html'
  run_main(
    audit,
    f'--checkpoint={run_dir}',
    '--dataset=digits',
    '--split=test',
    '--rounds=2',
    f'--output_dir={tmp_path}',
    f'--html={page}',
    '--folds=2',
    '--C=1',
    '--max_iter=20',
  )
  (file,) = tmp_path.rglob('test.safetensors')
  # A command that can be repeated.
  assert rows_lib.read(str(file)).provenance['command'].startswith('python -m het_plugin.audit')
  images, labels = tasks.get_task('digits').examples.read('test', np.arange(359), 8, 0)
  shown = sum(pictures(page.read_text()).values(), [])
  assert shown
  for image, _, text in shown:
    expected = np.round((images[int(text.partition('#')[2]), ..., 0] + 1) * 127.5)
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize(
  'split,config,is_warned',
  [
    ('train', "MIXTURE_OR_TASK_NAME = 'npz:a.npz'", True),
    ('test', "MIXTURE_OR_TASK_NAME = 'npz:a.npz'", False),
    ('train', "MIXTURE_OR_TASK_NAME = 'npz:b.npz'", False),
  ],
)
def test_features_that_have_learned_the_labels(split, config, is_warned, tmp_path):
  x = np.random.default_rng(0).normal(size=(40, 2))
  about = {'dataset': 'npz:a.npz', 'split': split, 'config': config}
  labels = np.int32(x[:, :1] > 0)
  rows = rows_lib.Rows({'features': x}, labels, np.arange(40), provenance=about)
  path = str(tmp_path / f'{split}.npz')
  rows_lib.write(path, rows)
  settings = GridSettings(['det'], folds=2, progress=False)
  fast = {'heads': ('het_h',), 'num_factors': 1, 'folds': 2, 'max_iter': 2}
  reports = [
    audit.report(path, settings, rounds=1),
    probe.probe(path, None, settings),
    noise_test.run(noise_test.Settings(train=path, **fast)),
  ]
  for report in reports:
    assert any('trained on these labels' in note for note in report.notes) == is_warned


def test_what_is_wrong_is_one_sentence(noisy, run_main, tmp_path):
  path, _, label = noisy
  rare = tmp_path / 'rare.npz'
  labels = np.append(label[:-1], 3)[:, None]
  np.savez(rare, features=np.zeros((900, 2), np.float32), labels=labels, index=np.arange(900))
  votes = tmp_path / 'votes.csv'
  votes.write_text('file,label,annotator\ntrain/wren/1.jpg,wren,eva\n')
  several = tmp_path / 'several.npz'
  both = np.stack([label, (label + 1) % 3], axis=1).astype(np.int32)
  rows_lib.write(several, dataclasses.replace(rows_lib.read(str(path)), labels=both))
  shard = shutil.copy(path, tmp_path / 'part-00000-of-00001.npz')
  of_test = tmp_path / 'of_test.npz'
  about = {'dataset': 'digits', 'split': 'test'}
  rows_lib.write(of_test, dataclasses.replace(rows_lib.read(str(path)), provenance=about))
  for arguments, message in (
    ([], '--train is needed'),
    ([f'--train={path}', '--checkpoint=x'], '--train and --checkpoint cannot go together'),
    ([f'--train={path}', '--layer=block00'], '--layer is for --checkpoint'),
    ([f'--train={path}', '--output_dir=x'], '--output_dir is for --checkpoint'),
    ([f'--train={path}', '--split=test'], 'a split of a file is --train=F.npz:SPLIT'),
    ([f'--train={path}', f'--suggest={path}'], 'is read by the audit: name another file'),
    ([f'--train={path}:train', f'--suggest={path}'], 'is read by the audit: name another file'),
    (
      [f'--train={tmp_path}/part-*-of-00001.npz', f'--suggest={shard}'],
      'is read by the audit: name another file',
    ),
    ([f'--train={path}', '--suggest=new.npy'], '--suggest=new.npy must end in .npz'),
    ([f'--train={path}', '--suggest=labels.csv'], 'needs --dataset=image_folder:PATH'),
    (
      [f'--train={path}', '--pred_probs=p.npy', '--folds=2'],
      '--folds has no effect on --pred_probs',
    ),
    ([f'--train={path}', '--pred_probs=p.npy'], 'p.npy'),
    ([f'--train={path}', f'--csv={votes}'], 'votes.csv is there, and no command has written it'),
    ([f'--train={path}', f'--json={votes}'], 'votes.csv is there, and no command has written it'),
    ([f'--train={several}'], 'several.npz: example 7 has 2 labels, and none is there twice'),
    ([f'--train={path}', '--head=det', '--C_noise=1'], 'no effect on --head=det'),
    ([f'--train={path}', '--C=-1'], '--C=-1'),
    ([f'--train={path}', '--C_noise=x'], '--C_noise=x must be a number, or auto'),
    ([f'--train={rare}'], 'class 3 has 1 rows: --folds=5 needs'),
    ([f'--train={tmp_path / "none.npz"}'], 'none.npz'),
    (
      [f'--train={path}', '--dataset=digits', '--split=dev'],
      "split='dev' is not a split of digits",
    ),
    ([f'--train={path}', '--dataset=digits', '--split=test'], 'id 906; ids of digits, split test'),
    ([f'--train={path}', '--dataset=digits'], 'class names of the rows are not those of digits'),
    ([f'--train={of_test}', '--dataset=digits'], '--split=train: the rows are of the split test'),
  ):
    assert message in run_main(audit, *arguments, code=2)
  with pytest.raises(flags.IllegalFlagValueError, match='--head=lda: value should be one of <det'):
    run_main(audit, f'--train={path}', '--head=lda')
