"""Models of the Hugging Face hub by name: 'hf:OWNER/NAME', or 'hf:OWNER/NAME@REVISION'."""

import functools
import importlib
import os
import re

from etils import epath

_NAME = re.compile(r'hf:(?P<model>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?')
_DESCRIPTIONS = ('*.json',)
_WEIGHTS = ('model.safetensors', 'open_clip_model.safetensors')
INDEX = '.index.json'  # after the name of a file in shards


def is_name(path: epath.PathLike) -> bool:
  """Whether a text names a model of the hub."""
  return str(path).startswith('hf:')


def local(path: epath.PathLike) -> epath.PathLike:
  """The weights file of a model of the hub, in the cache of huggingface_hub; another path as it is,
  without '.index.json'.

  Downloads the weights and the descriptions beside them, or takes those in the cache where the hub
  cannot be reached. `HF_ENDPOINT` and `HF_HOME` are read as by huggingface_hub.

  Raises:
    ValueError: the name is no name, huggingface_hub is not installed, or there is no such model.
  """
  if is_name(path):
    return _downloaded(str(path))
  name = str(path).removesuffix(INDEX)
  return name if name.endswith('.safetensors') else path


@functools.cache
def _downloaded(text: str) -> str:
  name = _NAME.fullmatch(text)
  if name is None:
    raise ValueError(f'{text} must be hf:OWNER/NAME, or hf:OWNER/NAME@REVISION')
  try:
    huggingface_hub = importlib.import_module('huggingface_hub')
  except ImportError as error:
    raise ValueError(f'{text} needs huggingface_hub: pip install "het_plugin[remote]"') from error
  model = name['model']

  def fetch(*patterns: str) -> str:
    return huggingface_hub.snapshot_download(
      model, revision=name['revision'], allow_patterns=list(patterns)
    )

  try:
    folder = fetch(*_DESCRIPTIONS)
    if os.path.exists(f'{folder}/{_WEIGHTS[0]}{INDEX}'):
      fetch('model-*-of-*.safetensors')
      return f'{folder}/{_WEIGHTS[0]}'
    for file in _WEIGHTS:
      folder = fetch(file)
      if os.path.exists(f'{folder}/{file}'):
        return f'{folder}/{file}'
  except Exception as error:  # huggingface_hub and its HTTP client each raise their own types
    revision = f' --revision={name["revision"]}' if name['revision'] else ''
    raise ValueError(
      f'{text} is neither in the cache nor can it be fetched ({type(error).__name__}): where there '
      f'is a network, run hf download {model}{revision}, and set HF_HOME to its cache here'
    ) from error
  raise ValueError(f'{text} has neither {" nor ".join(_WEIGHTS)}: take a model in safetensors')
