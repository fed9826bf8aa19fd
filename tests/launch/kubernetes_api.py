"""The part of a Kubernetes API that kubectl needs for nodes and JobSets."""

import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GROUP = 'jobset.x-k8s.io'
VERSION = 'v1alpha2'
JOBSETS = f'apis/{GROUP}/{VERSION}'
VERBS = ['create', 'delete', 'get', 'list', 'patch', 'watch']
GRACE_SECONDS = 1  # that pods take to save and end


def _resources(version: str, name: str, kind: str, namespaced: bool) -> dict[str, Any]:
  resource = {'name': name, 'singularName': kind.lower(), 'kind': kind, 'verbs': VERBS}
  resources = [resource | {'namespaced': namespaced}]
  return {'kind': 'APIResourceList', 'groupVersion': version, 'resources': resources}


def _discovery() -> dict[str, Any]:
  """What kubectl asks first, by path."""
  version = {'groupVersion': f'{GROUP}/{VERSION}', 'version': VERSION}
  kind = {'group': GROUP, 'kind': 'JobSet', 'version': VERSION}
  # Says that the server validates, strictly if it is asked to.
  patch = {
    'parameters': [{'name': 'fieldValidation', 'in': 'query'}],
    'responses': {},
    'x-kubernetes-group-version-kind': kind,
  }
  path = f'/{JOBSETS}/namespaces/{{namespace}}/jobsets/{{name}}'
  groups = [{'name': GROUP, 'versions': [version], 'preferredVersion': version}]
  return {
    'version': {'major': '1', 'minor': '33', 'gitVersion': 'v1.33.0'},
    'api': {'kind': 'APIVersions', 'versions': ['v1']},
    'apis': {'kind': 'APIGroupList', 'apiVersion': 'v1', 'groups': groups},
    'api/v1': _resources('v1', 'nodes', 'Node', False),
    JOBSETS: _resources(f'{GROUP}/{VERSION}', 'jobsets', 'JobSet', True),
    'openapi/v3': {'paths': {JOBSETS: {'serverRelativeURL': f'/openapi/v3/{JOBSETS}'}}},
    f'openapi/v3/{JOBSETS}': {
      'openapi': '3.0.0',
      'info': {'title': '', 'version': ''},
      'paths': {path: {'patch': patch}},
    },
  }


class Server(http.server.ThreadingHTTPServer):
  """Nodes, and the JobSets that were applied, by name.

  A deletion in the foreground takes GRACE_SECONDS.
  """

  daemon_threads = True

  def __init__(self, nodes: Sequence[Mapping[str, Any]]):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.nodes = nodes
    self.jobsets: dict[str, dict[str, Any]] = {}
    self.requests: list[str] = []
    self.changed = threading.Condition()

  def write_kubeconfig(self, path: Path) -> None:
    cluster = {'server': f'http://127.0.0.1:{self.server_port}'}
    config = {
      'apiVersion': 'v1',
      'kind': 'Config',
      'clusters': [{'name': 'c', 'cluster': cluster}],
      'users': [{'name': 'u', 'user': {}}],
      'contexts': [{'name': 'x', 'context': {'cluster': 'c', 'user': 'u'}}],
      'current-context': 'x',
    }
    path.write_text(json.dumps(config))

  def remove(self, name: str) -> None:
    time.sleep(GRACE_SECONDS)
    with self.changed:
      del self.jobsets[name]
      self.changed.notify_all()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  server: Server

  def log_message(self, *_: Any) -> None:
    pass

  def _answer(self, document: Any, code: int = 200) -> None:
    body = json.dumps(document).encode() + b'\n'
    self.send_response(code)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def _read(self) -> Any:
    return json.loads(self.rfile.read(int(self.headers.get('Content-Length', 0))) or 'null')

  def _asked(self) -> tuple[str, str, dict[str, str]]:
    """The path, its last part, and the query; keeps the request."""
    self.server.requests.append(f'{self.command} {self.path}')
    url = urllib.parse.urlsplit(self.path)
    path = url.path.strip('/')
    return path, path.rpartition('/')[2], dict(urllib.parse.parse_qsl(url.query))

  def _one(self, name: str, code: int = 200) -> None:
    if found := self.server.jobsets.get(name):
      self._answer(found, code)
    else:
      status = {'kind': 'Status', 'status': 'Failure', 'reason': 'NotFound', 'code': 404}
      self._answer(status | {'apiVersion': 'v1', 'message': f'{name} not found'}, 404)

  def do_GET(self) -> None:  # noqa: N802
    path, last, query = self._asked()
    selected = dict(x.split('=') for x in query.get('labelSelector', '').split(',') if x)
    if path in (known := _discovery()):
      self._answer(known[path])
    elif path == 'api/v1/nodes':
      labels = selected.items()
      nodes = [x for x in self.server.nodes if labels <= x['metadata']['labels'].items()]
      self._answer({'kind': 'NodeList', 'apiVersion': 'v1', 'metadata': {}, 'items': nodes})
    elif last != 'jobsets':
      self._one(last)
    elif 'watch' not in query:
      version = f'{GROUP}/{VERSION}'
      items = list(self.server.jobsets.values())
      metadata = {'resourceVersion': '1'}
      self._answer(
        {'kind': 'JobSetList', 'apiVersion': version, 'metadata': metadata, 'items': items}
      )
    else:  # until it is gone
      name = query['fieldSelector'].partition('=')[2]
      found = self.server.jobsets.get(name)
      with self.server.changed:
        self.server.changed.wait_for(lambda: name not in self.server.jobsets, 60)
      self._answer({'type': 'DELETED', 'object': found})

  def do_POST(self) -> None:  # noqa: N802
    self._asked()
    jobset = self._read()
    name = jobset['metadata']['name']
    jobset['metadata'] |= {'uid': name, 'resourceVersion': '1', 'namespace': 'default'}
    self.server.jobsets[name] = jobset
    self._one(name, 201)

  def do_DELETE(self) -> None:  # noqa: N802
    _, name, _ = self._asked()
    how = self._read()
    if name in self.server.jobsets and how['propagationPolicy'] == 'Foreground':
      finalizers = {
        'finalizers': ['foregroundDeletion'],
        'deletionTimestamp': '2026-01-01T00:00:00Z',
      }
      self.server.jobsets[name]['metadata'] |= finalizers
      threading.Thread(target=self.server.remove, args=[name], daemon=True).start()
    self._one(name)
