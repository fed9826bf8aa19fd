"""The names of data sets of TensorFlow Datasets, without importing it."""

import re

# [NAMESPACE:]NAME[/CONFIG][:VERSION][/KEY=VALUE,...]; TFDS's own parser raises on anything else.
_NAME = re.compile(
  r'((?P<namespace>[\w-]+):)?[A-Za-z]\w*(/[\w+.-]+)?(:[\d.*]+)?(/\w+=.+)?', re.DOTALL
)


def is_valid(name: str) -> bool:
  return _NAME.fullmatch(name) is not None


def namespace(name: str) -> str | None:
  """The namespace of a data set, such as 'kaggle'; None without one and for other text.

  TFDS downloads and runs the code of a data set with a namespace when it is asked for its name.
  """
  match = _NAME.fullmatch(name)
  return match['namespace'] if match else None
