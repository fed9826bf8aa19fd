"""Models by name, from a hub of our own on this machine."""

import functools
import http.server
import json
import sys
import threading

import numpy as np
import pytest

from het_plugin import weights
from het_plugin.weights import hub

COMMIT = '0123456789abcdef0123456789abcdef01234567'


class Hub(http.server.BaseHTTPRequestHandler):
  """The three calls of the Hugging Face hub that a download makes, for one model."""

  def __init__(self, files, *args):
    self.files = files
    super().__init__(*args)

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    path = self.path.partition('?')[0]
    name = path.rpartition('/')[2]
    if path.startswith('/api/models/owner/tower/revision/'):
      siblings = [{'rfilename': name} for name in self.files]
      content = json.dumps({'id': 'owner/tower', 'sha': COMMIT, 'siblings': siblings}).encode()
    elif path.startswith('/api/models/owner/tower/tree/'):
      sizes = {name: len(x) for name, x in self.files.items()}
      tree = [{'type': 'file', 'path': n, 'size': x, 'oid': n} for n, x in sizes.items()]
      content = json.dumps(tree).encode()
    elif path.startswith('/owner/tower/resolve/') and name in self.files:
      content = self.files[name]
    else:
      self.send_error(404)
      return
    self.send_response(200)
    self.send_header('Content-Length', str(len(content)))
    self.send_header('ETag', f'"{name}"')
    self.send_header('X-Repo-Commit', COMMIT)
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(content)

  def log_message(self, *args):
    pass


def test_a_model_by_name(tmp_path, monkeypatch):
  pytest.importorskip('huggingface_hub')
  source = tmp_path / 'model.safetensors'
  weights.write_arrays(source, {'norm.weight': np.ones(3, np.float32)})
  files = {'config.json': b'{"num_attention_heads": 3}', source.name: source.read_bytes()}
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Hub, files))
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  # Another hub's address is read when huggingface_hub is imported.
  for module in [x for x in sys.modules if x.partition('.')[0] == 'huggingface_hub']:
    monkeypatch.delitem(sys.modules, module)
  monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{server.server_port}')
  monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setenv('HF_HUB_DISABLE_XET', '1')
  monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
  hub._downloaded.cache_clear()
  try:
    name = 'hf:owner/tower@main'
    assert weights.is_weights_file(name)
    np.testing.assert_array_equal(weights.read_arrays(name)['norm.weight'], 1)
    assert weights.read_config(name) == {'num_attention_heads': 3}
    with pytest.raises(ValueError, match='owner/other is neither in the cache .* hf download'):
      weights.read_arrays('hf:owner/other')
  finally:
    server.shutdown()
    thread.join()
    server.server_close()
  hub._downloaded.cache_clear()
  assert weights.read_config(name) == {'num_attention_heads': 3}  # of the cache, without the hub


def test_names_that_are_none():
  with pytest.raises(ValueError, match='hf:tower must be hf:OWNER/NAME'):
    weights.read_arrays('hf:tower')
