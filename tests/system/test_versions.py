import importlib.metadata

from het_plugin.system import versions


def test_packages_outside_the_ranges_of_core_and_trainer_are_named(monkeypatch):
  required = [
    'jax<0.13,>=0.10.2',
    'optax<0.3,>=0.2.8; extra == "train"',
    'clu>=0.0.12; extra == "train"',
    'mkdocs>=1.6; extra == "docs"',
    'absent>=2',
  ]
  installed = {'jax': '0.13.1', 'optax': '0.2.7rc1', 'clu': '0.0.12', 'mkdocs': '1.0'}

  def version(name):
    if name not in installed:
      raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]

  monkeypatch.setattr(importlib.metadata, 'requires', lambda _: required)
  monkeypatch.setattr(importlib.metadata, 'version', version)
  wanted = "'jax<0.13,>=0.10.2' 'optax<0.3,>=0.2.8'"
  expected = f'het_plugin does not support jax 0.13.1, optax 0.2.7rc1: pip install {wanted}'
  assert versions.unsupported() == expected
  installed.update(jax='0.12.0', optax='0.2.8')
  assert versions.unsupported() == ''
