"""Files far away: read in ranges, with retries and a bounded cache on disk.

https:// and http:// are read with Python's own library, other addresses such as gs://, s3:// and
hf:// with fsspec and its extension for them. HET_PLUGIN_CACHE_GIB bounds the cache (default 20).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import http.client
import io
import os
import pathlib
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

_ATTEMPTS = 7
_FIRST_WAIT = 0.1  # seconds; doubles with each attempt, so all together are 6 to 12 s
_TIMEOUT = 30.0  # seconds without a byte
_STREAM_BYTES = 2**23  # that reading from the start to the end asks for at a time
_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs', 'hf': 'huggingface_hub', 'az': 'adlfs'}
_AT_ONCE = 32  # requests of a process
_NEVER = FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError


def is_remote(path: str) -> bool:
  """Whether a path is an address, such as gs://bucket/file."""
  return '://' in path


class Store(Protocol):
  """Where files are, by address. A store is pickled for worker processes."""

  def find(self, address: str, pattern: str) -> list[str]:
    """Addresses of an existing file, or of those that match a pattern, or below a folder."""
    ...

  def stat(self, address: str) -> tuple[int, int]:
    """Size, and a checksum of what tells that the file changed."""
    ...

  def fetch(self, address: str, offset: int, size: int) -> bytes: ...


class HttpStore:
  """A web server that understands ranges. It lists no files."""

  def find(self, address: str, pattern: str) -> list[str]:
    if '*' in address:
      raise ValueError(
        f'{address}: a web server lists no files: write their names with braces, '
        'train-{00000..00041}.parquet.'
      )
    return [address]

  def stat(self, address: str) -> tuple[int, int]:
    with self._open(address, 'bytes=0-0') as answer:
      _, _, size = answer.headers.get('Content-Range', '').rpartition('/')
      if answer.status != http.HTTPStatus.PARTIAL_CONTENT or not size.isdecimal():
        raise ValueError(f'{address}: the server cannot send a part of a file (Range).')
      tags = answer.headers.get('ETag'), answer.headers.get('Last-Modified')
      return int(size), zlib.crc32(repr(tags).encode())

  def fetch(self, address: str, offset: int, size: int) -> bytes:
    with self._open(address, f'bytes={offset}-{offset + size - 1}') as answer:
      return answer.read()

  @contextlib.contextmanager
  def _open(self, address: str, part: str) -> Iterator[Any]:
    request = urllib.request.Request(address, headers={'Range': part})
    try:
      with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        yield answer
    except urllib.error.HTTPError as error:
      # A server that is busy (429), or has a fault of its own, may answer the next time.
      if error.code < 500 and error.code not in (408, 429):
        kind = PermissionError if error.code in (401, 403) else FileNotFoundError
        raise kind(f'{error.code} {error.reason}') from error
      raise


class FsspecStore:
  """Any other store, by a file system of fsspec."""

  def __init__(self, scheme: str):
    """ValueError if fsspec, or its extension for these addresses, is not installed."""
    try:
      import fsspec

      # A listing that is kept would hide that a file changed since.
      self._files = fsspec.filesystem(scheme, use_listings_cache=False)
    except (ImportError, ValueError) as error:
      package = _PACKAGES.get(scheme, 'fsspec and its extension')
      raise ValueError(f'{scheme}:// needs a library: pip install {package} ({error}).') from error
    self._scheme = scheme

  def find(self, address: str, pattern: str) -> list[str]:
    if '*' not in address:
      if not self._files.isdir(address):
        return [address] if self._files.exists(address) else []
      address = f'{address.rstrip("/")}/{pattern}'
    paths = (path.partition('://')[2] or path for path in self._files.glob(address))
    return sorted(f'{self._scheme}://{path.lstrip("/")}' for path in paths)

  def stat(self, address: str) -> tuple[int, int]:
    info = self._files.info(address)
    names = (
      'ETag',
      'etag',
      'mtime',
      'LastModified',
      'last_modified',
      'updated',
      'md5Hash',
      'blob_id',
    )
    return info['size'], zlib.crc32(repr([info.get(name) for name in names]).encode())

  def fetch(self, address: str, offset: int, size: int) -> bytes:
    return self._files.cat_file(address, start=offset, end=offset + size)


@functools.cache
def store_of(address: str) -> Store:
  """The store of an address, by its scheme."""
  scheme = address.partition('://')[0]
  return HttpStore() if scheme in ('http', 'https') else FsspecStore(scheme)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
  """A file far away.

  relative: its address below what the user named.
  """

  address: str
  relative: str
  store: Store

  is_remote = True

  def __str__(self) -> str:
    return self.address

  def stat(self) -> tuple[int, int]:
    """Size and a checksum; ValueError if there is no such file."""
    return _retried(self.address, lambda: self.store.stat(self.address))

  def check_unchanged(self, stat: tuple[int, int]) -> None:
    """Raises ValueError if `stat` is another one now."""
    if self.stat() != stat:
      raise ValueError(f'{self} changed since the start: start again.')

  def fetch(self, offset: int, size: int) -> bytes:
    """Reads a range, again if that fails or returns less.

    Raises:
      ValueError: there is no such file, or no right to read it.
      RuntimeError: all attempts failed.
    """

    def attempt() -> bytes:
      content = self.store.fetch(self.address, offset, size)
      if len(content) != size:
        raise OSError(f'{len(content)} bytes came in place of {size}')
      return content

    return _retried(self.address, attempt) if size else b''

  def reader(
    self, stat: tuple[int, int]
  ) -> contextlib.AbstractContextManager[Callable[[int, int, tuple[int, int]], bytes]]:
    """A function that reads parts of blocks that are kept on disk."""
    return contextlib.nullcontext(functools.partial(_read_part, self, stat))

  def open(self) -> io.BufferedReader:
    """The file for reading from its start to its end."""
    size, _ = self.stat()
    return io.BufferedReader(_Ranges(size, self.fetch), _STREAM_BYTES)

  def open_blocks(self, stat: tuple[int, int]) -> io.RawIOBase:
    """The file for reading; each read is of one block, which is kept on disk."""

    def fetch(offset: int, size: int) -> bytes:
      return _read_part(self, stat, offset, size, (offset, size))

    return _Ranges(stat[0], fetch)


def _read_part(
  file: RemoteFile, stat: tuple[int, int], offset: int, size: int, block: tuple[int, int]
) -> bytes:
  """`size` bytes from `offset` of a block (offset, size), fetched once and kept on disk."""
  name = hashlib.sha256(repr((file.address, stat, block)).encode()).hexdigest()[:40]
  path = cache_folder() / name
  with _LOCKS[int(name[:4], 16) % len(_LOCKS)]:  # several threads may want it
    with contextlib.suppress(OSError), open(path, 'rb') as kept:
      if os.fstat(kept.fileno()).st_size == block[1]:
        os.utime(kept.fileno())  # the oldest are removed first
        return os.pread(kept.fileno(), size, offset - block[0])
    content = file.fetch(*block)
    file.check_unchanged(stat)  # a small request for a whole block, which is kept for days
    _keep(path, content)
  return content[offset - block[0] :][:size]


def each(call: Callable[[Any], None], values: Iterable[Any], *, at_once: bool) -> None:
  """Calls a function of each value, at once where most of the time is spent waiting."""
  for _ in _pool().map(call, values) if at_once else map(call, values):
    pass


@functools.cache
def _pool() -> concurrent.futures.Executor:
  return concurrent.futures.ThreadPoolExecutor(_AT_ONCE, 'remote')


class _Ranges(io.RawIOBase):
  """A file for Python's and Arrow's readers, of a function that reads ranges."""

  def __init__(self, size: int, fetch: Callable[[int, int], bytes]):
    self._size = size
    self._fetch = fetch
    self._position = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._position

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
    self._position = max(base + offset, 0)
    return self._position

  def readinto(self, buffer: Any) -> int:
    size = max(min(len(buffer), self._size - self._position), 0)
    buffer[:size] = self._fetch(self._position, size) if size else b''
    self._position += size
    return size


def cache_folder(kind: str = 'blocks') -> pathlib.Path:
  """Where blocks, or another kind of what can be made again, are kept for this user."""
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return pathlib.Path(cache, 'het_plugin', kind)


def _cache_bytes() -> int:
  text = os.environ.get('HET_PLUGIN_CACHE_GIB', '20')
  try:
    gib = float(text)
  except ValueError as error:
    raise ValueError(f'HET_PLUGIN_CACHE_GIB is {text!r}; it must be a number of GiB.') from error
  return int(gib * 2**30)


_LOCKS = [threading.Lock() for _ in range(64)]
_written_lock = threading.Lock()
_written = {'bytes': float('inf')}  # since the cache was last measured


def _keep(path: pathlib.Path, content: bytes) -> None:
  """Writes a block into the cache; without room on the disk it is read again at the next use."""
  limit = _cache_bytes()
  if len(content) > limit / 8:
    return
  with _written_lock:
    _written['bytes'] += len(content)
    if _written['bytes'] > limit / 8:
      _written['bytes'] = 0
      _shrink(path.parent, limit * 3 // 4)
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix='.', delete=False) as file:
      try:
        file.write(content)
        file.flush()
        os.replace(file.name, path)
      except OSError:
        os.unlink(file.name)


def _shrink(folder: pathlib.Path, limit: int) -> None:
  """Removes the blocks that were not used for longest, until the others have `limit` bytes."""
  found = []
  with contextlib.suppress(OSError):
    for entry in os.scandir(folder):
      with contextlib.suppress(OSError):  # another process may remove them, too
        found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
  total = sum(size for _, size, _ in found)
  for _, size, path in sorted(found):
    if total <= limit:
      break
    with contextlib.suppress(OSError):
      os.unlink(path)
    total -= size


def _retried(address: str, call: Callable[[], Any]) -> Any:
  """What `call` returns, which is called again if it fails; RuntimeError at the last attempt."""
  for attempt in range(_ATTEMPTS):
    try:
      return call()
    except ValueError:
      raise
    except _NEVER as error:
      raise ValueError(f'{address} cannot be read: {error}') from error
    except Exception as error:  # each store raises its own
      if attempt == _ATTEMPTS - 1:
        raise RuntimeError(f'{address} cannot be read ({_ATTEMPTS} attempts): {error}') from error
    # Random, so that the processes of a pod do not all come back at once.
    time.sleep(_FIRST_WAIT * 2**attempt * random.uniform(1, 2))
  raise AssertionError
