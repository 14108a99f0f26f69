"""Answers that mean harm, by what they try. Each passes its test only if it succeeds: none may.

Words in capitals are filled in: SECRET is in the environment of whoever runs them, FOLDER is a folder of theirs with a
file `secret`, TEMPORARY and HOME are those of the machine, CALLER is a process and PORT one that listens.
"""

from __future__ import annotations

from typing import NamedTuple

SECRET = "hunter2-7351"


class Attack(NamedTuple):
    code: str
    test: str = "assert attack() == 1"
    needs: tuple[str, ...] = ()  # walls without which it is not held off
    program: bool = False
    entry_point: str | None = None


NEAR_THREE = "assert abs(attack() - 3.0) < 1e-3"
FORGER = """
import json, os
def frame(text):
    return len(text).to_bytes(8, 'little') + text
def say(message):
    os.write(4, frame(json.dumps(message).encode()))
def forge(names, *replies):
    say({'result': names})
    while os.read(3, 2**16):
        for reply in replies: say(reply)
def attack(): return 5.0
"""
CLONER = """
import ctypes
libc = ctypes.CDLL(None)
stack, storage, word = (ctypes.create_string_buffer(2**size) for size in (14, 12, 3))
top = ctypes.c_void_p(ctypes.addressof(stack) + 2**14 & ~15)
def clone(flags):
    return libc.clone(libc.pause, top, flags, None, word, storage, word)
"""
SHARED, OWN_FILES, OWN_DIRECTORY = (
    0x3D0F00,
    0x3D0B00,
    0x3D0D00,
)  # flags of a thread, and without CLONE_FILES or CLONE_FS
MAPPER = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def page(address):
    if libc.mmap(address, 4096, 3, 0x22 | 0x10, -1, 0) != address: raise MemoryError
    ctypes.memset(address, 1, 1)
"""

FUNCTIONS = {
    "fork bomb": Attack("import os\ndef attack():\n while True: os.fork()", needs=("seccomp",)),
    "one process": Attack(
        "import os\ndef attack():\n pid = os.fork()\n if pid == 0: os._exit(0)\n os.waitpid(pid, 0)\n return 1",
        needs=("seccomp",),
    ),
    "program": Attack("import subprocess\ndef attack():\n subprocess.run(['/bin/true'])\n return 1"),
    "thread bomb": Attack(
        "import threading, time\ndef attack():\n while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "200 threads without stacks": Attack(
        f"{CLONER}def attack(): return int(all(clone({SHARED}) > 0 for _ in range(200)))", needs=("process_limit",)
    ),
    "a thread with files of its own": Attack(
        f"{CLONER}def attack(): return int(clone({OWN_FILES}) > 0)", needs=("seccomp",)
    ),
    "a thread with a directory of its own": Attack(
        f"{CLONER}def attack(): return int(clone({OWN_DIRECTORY}) > 0)", needs=("seccomp",)
    ),
    "200 processes": Attack(
        "import os, time\ndef attack():\n for _ in range(200):\n  if os.fork() == 0: time.sleep(9); os._exit(0)\n return 1",
        needs=("process_limit",),
    ),
    "10 000 tables of pages": Attack(
        f"{MAPPER}def attack():\n for n in range(10**4): page(2**44 + n * 2**30)\n return 1", needs=("seccomp",)
    ),
    "moving a page far away": Attack(
        f"{MAPPER}def attack():\n import mmap\n here = ctypes.c_char.from_buffer(mmap.mmap(-1, 4096))\n"
        " libc.mremap.restype = ctypes.c_void_p\n"
        " return int(libc.mremap(ctypes.c_void_p(ctypes.addressof(here)), 4096, 4096, 3, ctypes.c_void_p(2**44)) == 2**44)",
        needs=("seccomp",),
    ),
    "pairs of datagram sockets": Attack(
        "import socket\ndef attack():\n socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n return 1",
        needs=("seccomp",),
    ),
    "10 GB list": Attack("def attack():\n x = [0] * (10 * 2**30 // 8)\n return 1"),
    "ever more memory": Attack("def attack():\n x = []\n while True: x.append(bytearray(2**20))"),
    "endless loop": Attack("def attack():\n while True: pass"),
    "endless loop at import": Attack("while True: pass"),
    "deaf endless loop": Attack(
        "import signal\ndef attack():\n"
        " for n in range(1, 32):\n  if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        " while True: pass"
    ),
    "sleep": Attack("import time\ndef attack():\n time.sleep(60)\n return 1"),
    "file in a folder": Attack("def attack():\n open('FOLDER/written', 'w').write('x')\n return 1"),
    "file in the temporary folder": Attack("def attack():\n open('TEMPORARY/written-7351', 'w').write('x')\n return 1"),
    "file at home": Attack("import os\ndef attack():\n open('HOME/written-7351', 'a')\n return 1"),
    "file here": Attack("def attack():\n open('written-7351', 'x')\n return 1"),
    "removing": Attack("import os\ndef attack():\n os.remove('FOLDER/secret')\n return 1"),
    "truncating": Attack("import os\ndef attack():\n os.truncate('FOLDER/secret', 0)\n return 1"),
    "renaming": Attack("import os\ndef attack():\n os.rename('FOLDER/secret', 'FOLDER/taken')\n return 1"),
    "changing mode": Attack("import os\ndef attack():\n os.chmod('FOLDER/secret', 0)\n return 1"),
    "symbolic link": Attack("import os\ndef attack():\n os.symlink('/etc', 'FOLDER/link')\n return 1"),
    "link in its own folder": Attack("import os\ndef attack():\n os.symlink('/', 'link')\n return 1"),
    "library": Attack("import os\ndef attack():\n open(os.__file__, 'r+')\n return 1"),
    "reading a file": Attack(
        "def attack(): return open('FOLDER/secret').read()", "assert attack() == 'SECRET'", ("namespaces",)
    ),
    "reading through a directory": Attack(
        "import os\ndef attack(): return os.listdir('FOLDER')", "assert attack() == ['secret']", ("namespaces",)
    ),
    "environment": Attack("import os\ndef attack(): return str(os.environ)", "assert 'SECRET' in attack()"),
    "environments of processes": Attack(
        "import glob\ndef attack():\n found = ''\n for path in glob.glob('/proc/*/environ'):\n"
        "  try: found += open(path).read()\n  except OSError: pass\n return found",
        "assert 'SECRET' in attack()",
        ("namespaces",),
    ),
    "socket": Attack("import socket\ndef attack():\n socket.create_connection(('127.0.0.1', PORT), 1)\n return 1"),
    "socket of a name": Attack(
        "import socket\ndef attack():\n s = socket.socket(socket.AF_UNIX)\n s.connect('\\0written-7351')\n return 1"
    ),
    "killing the parent": Attack("import os\ndef attack():\n os.kill(os.getppid(), 9)\n return 1", needs=("seccomp",)),
    "killing by number": Attack("import os\ndef attack():\n os.kill(CALLER, 9)\n return 1"),
    "killing its group": Attack("import os\ndef attack():\n os.kill(0, 9)\n return 1"),
    "killing everybody": Attack("import os\ndef attack():\n os.kill(-1, 9)\n return 1", needs=("seccomp",)),
    "signals by a pipe": Attack(
        "import fcntl, os, signal\ndef attack():\n r, w = os.pipe()\n fcntl.fcntl(r, fcntl.F_SETOWN, CALLER)\n"
        " fcntl.fcntl(r, fcntl.F_SETSIG, 9)\n fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\n os.close(w)\n return 1"
    ),
    "limits of others": Attack(
        "import resource\ndef attack():\n resource.prlimit(CALLER, resource.RLIMIT_NOFILE, (4, 4))\n return 1"
    ),
    "raising its limits": Attack(
        "import resource\ndef attack():\n resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\n return 1"
    ),
    "daemon": Attack(
        "import os, time\ndef attack():\n if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n"
        "  os._exit(0)\n return 1",
        needs=("seccomp",),
    ),
    "closing descriptors": Attack("import os\ndef attack():\n os.closerange(0, 1000)\n return 1"),
    "leaving": Attack("import os\nos._exit(0)"),
    "leaving in the call": Attack("import os\ndef attack(): os._exit(0)"),
    "exit": Attack("import sys\ndef attack(): sys.exit(0)"),
    "crash": Attack("import ctypes\ndef attack(): ctypes.string_at(0)"),
    "deep recursion": Attack(
        "import sys\ndef attack():\n sys.setrecursionlimit(10**9)\n def f(): return f()\n return f()"
    ),
    "claims on all descriptors": Attack(
        "import json, os\ndef attack():\n"
        " for fd in range(50):\n  for claim in ({'passed': 1}, {'result': 1}, {'result': 1, 'args': []}):\n"
        "   text = json.dumps(claim).encode()\n"
        "   try: os.write(fd, len(text).to_bytes(8, 'little') + text)\n   except OSError: pass\n"
        " return 2",
        "assert attack() == 3",
    ),
    "no message": Attack("import os\ndef attack():\n os.write(4, b'x' * 100000)\n return 1"),
    "equal to anything": Attack(
        "class Any:\n __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = lambda *_: True\n"
        " __sub__ = __rsub__ = __abs__ = lambda *_: 0\n __hash__ = lambda _: 0\n"
        "def attack(): return Any()"
    ),
    "near anything": Attack(
        "class Any(float):\n __eq__ = __le__ = __lt__ = lambda *_: True\n"
        " __sub__ = __rsub__ = __abs__ = lambda *_: 0.0\n"
        "def attack(): return Any(5)",
        "assert abs(attack() - 1) < 1e-6",
    ),
    "list equal to anything": Attack(
        "class Any(list):\n __eq__ = lambda *_: True\n __ne__ = lambda *_: False\ndef attack(): return Any([2])",
        "assert attack() == [1]",
    ),
    "its own sorted": Attack("def sorted(x): return [1]\ndef attack(): return 2", "assert sorted([attack()]) == [1]"),
    "patched builtins": Attack(
        "import builtins\nbuiltins.sorted = lambda x: [1]\ndef attack(): return 2", "assert sorted([attack()]) == [1]"
    ),
    "ends the loop": Attack(
        "def attack(x): raise StopIteration", "assert all(map(attack, [1, 2])) and [*map(attack, [1])] == []"
    ),
    "looks for what is expected": Attack(
        "import gc, re, sys\ndef attack():\n text = repr(gc.get_objects())\n frame = sys._getframe()\n"
        " while frame: text += repr((frame.f_locals, frame.f_globals)); frame = frame.f_back\n"
        " found = re.findall(r'needle-\\d+', text)\n return found[0] if found else None",
        "assert attack() == 'needle-7351'",
    ),
    "new namespaces": Attack(
        "import ctypes\ndef attack(): return ctypes.CDLL(None).unshare(0x10000000) + 1", needs=("seccomp",)
    ),
    "tracing": Attack("import ctypes, os\ndef attack(): return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) + 1"),
    "memory files": Attack("import os\ndef attack():\n os.memfd_create('x')\n return 1", needs=("seccomp",)),
    "calls back with an attribute": Attack(
        "def attack(f): return f.__globals__['__builtins__']", "assert attack(lambda: 1)"
    ),
    "makes a type of the tests": Attack(
        "def attack(make): return make('Any', (), {'__eq__': lambda *_: True})()", "assert attack(type) == 1"
    ),
    "evaluates for the tests": Attack(
        "def attack(f): return f('__import__(\"unittest.mock\").mock.ANY')", "assert attack(eval) == 1"
    ),
    "configures a mock": Attack(
        "def attack(mock): return mock(**{'__eq__.return_value': True})",
        "from unittest.mock import MagicMock\nassert attack(MagicMock) == 1",
    ),
    "calls a mock that makes mocks": Attack(
        "def attack(mock): return mock(**{'__eq__.return_value': True})",
        "from unittest.mock import MagicMock, Mock\nassert attack(Mock(side_effect=MagicMock)) == 1",
    ),
    "calls what calls a type": Attack(
        "def attack(make): return make('Any', (), {'__eq__': lambda *_: True})()",
        "from functools import partial\nassert attack(partial(type)) == 1",
    ),
    "gets a type from a function of the tests": Attack(
        "def attack(f): return f()('Any', (), {'__eq__': lambda *_: True})()", "assert attack(lambda: type) == 1"
    ),
}

# Those that tell the examiner something else than what the program's functions return.
FORGERIES = {
    "a name that was not asked for": Attack(
        "import sys\nsys._getframe(1).f_locals['wanted'].append('abs')\n"
        "def abs(x): return 0.0\ndef attack(): return 5.0",
        NEAR_THREE,
    ),
    "builtins that were not asked for": Attack(
        "import sys\nsys._getframe(1).f_locals['wanted'].append('__builtins__')\n"
        "__builtins__['sorted'] = lambda x: [1]\ndef attack(): return 2",
        "assert sorted([attack()]) == [1]",
    ),
    "builtins that were asked for": Attack(
        "__builtins__['sorted'] = lambda x: [1]\ndef attack(): return 2",
        "assert sorted([attack()]) == [1], __builtins__",
    ),
    "forged names": Attack(
        f"{FORGER}forge({{'dict': [['abs', {{'mine': 7}}], ['attack', {{'mine': 8}}]]}}, {{'result': 0.0}})", NEAR_THREE
    ),
    "forged names in pairs": Attack(
        f"{FORGER}forge([['abs', {{'mine': 7}}], ['attack', {{'mine': 8}}]], {{'result': 0.0}})", NEAR_THREE
    ),
    "forged names of an object": Attack(
        "import sys\nremote = sys.modules['sandbox.remote']\nwhole = remote.encode\n"
        "def attack(): return 5.0\n"
        "class Names:\n keys = lambda self: ['abs', 'attack']\n"
        " __getitem__ = lambda self, name: attack if name == 'attack' else lambda x: 0.0\n"
        "def encode(value, refer):\n"
        " if not isinstance(value, dict): return whole(value, refer)\n"
        " remote.encode = whole\n return refer(Names())\n"
        "remote.encode = encode",
        NEAR_THREE,
    ),
    "no names": Attack(f"{FORGER}forge(None, {{'result': 3.0}})", NEAR_THREE),
    "a list of names": Attack(f"{FORGER}forge(['abs', 'attack'], {{'result': 3.0}})", NEAR_THREE),
    "claims instead of results": Attack(f"{FORGER}forge({{'dict': [['attack', {{'mine': 1}}]]}}, {{'passed': 1}})"),
    "results of every shape": Attack(
        f"{FORGER}attacks = [1.5, {{'result': {{}}}}, {{'error': 1}}, {{'error': [[]], 'args': 1}}, [], None]\n"
        "forge({'dict': [['attack', {'mine': 1}]]}, *attacks)",
    ),
    "results in advance": Attack(
        f"{FORGER}for _ in range(1000): say({{'result': {{'dict': [['attack', {{'mine': 1}}]]}}}})"
    ),
    "an object that nobody gave": Attack(
        f"{FORGER}forge({{'dict': [['attack', {{'yours': 0}}]]}}, {{'result': {{'yours': 0}}}})"
    ),
    "a name that stands for anything": Attack(
        f"{FORGER}forge({{'dict': [['attack', {{'name': ['unittest.mock', 'ANY']}}]]}})",
        "import unittest.mock\nassert attack == 1",
    ),
    "a result by name": Attack(
        f"{FORGER}forge({{'dict': [['attack', {{'mine': 1}}]]}}, {{'result': {{'name': ['unittest.mock', 'ANY']}}}})",
        "import unittest.mock\nassert attack() == 1",
    ),
    "calls what nobody gave": Attack(
        f"{FORGER}say({{'call': 0, 'operation': '__call__', 'args': [], 'named': {{}}}})\nforge(None, {{'result': 1}})"
    ),
    "endless calls": Attack(
        f"{FORGER}while True: say({{'call': 0, 'operation': '__getattr__', 'args': ['x'], 'named': {{}}}})"
    ),
    "a reply without an end": Attack(f"{FORGER}os.write(4, (2**26).to_bytes(8, 'little'))\nforge(None)"),
    "a reply too long": Attack(f"{FORGER}os.write(4, (2**63).to_bytes(8, 'little'))\nforge(None)"),
    "a deep reply": Attack(f"{FORGER}text = b'[' * 2**20\nos.write(4, frame(text))\nforge(None)"),
    "a number too large": Attack(f"{FORGER}forge({{'Fraction': '1e9999999999'}}, {{'result': 1}})"),
    "an error that ends a process": Attack(
        f"{FORGER}forge({{'dict': [['attack', {{'mine': 1}}]]}}, {{'error': ['SystemExit', 'BaseException']}})"
    ),
    "an error that ends a loop": Attack(
        f"{FORGER}forge({{'dict': [['attack', {{'mine': 1}}]]}}, {{'error': ['StopIteration'], 'args': []}})",
        "assert [*map(attack, [1])] == []",
    ),
    "an error that ends an asynchronous loop": Attack(
        "def attack(x): raise StopAsyncIteration",
        "import asyncio\nclass Each:\n def __aiter__(self): return self\n async def __anext__(self): return attack(1)\n"
        "async def test():\n async for each in Each(): assert each == 1\nasyncio.run(test())",
    ),
    "claims in what the tests print": Attack(
        f"{FORGER}def attack(): return (frame(b'{{\"passed\": 1}}') + b'\\x7f' * 8).decode() + 'x' * 2**16",
        "print(attack())\nassert attack() == 1",
    ),
    "garbage in what the tests print": Attack(
        "def attack(): return '\\0' * 2**16", "print(attack())\nassert attack() == 1"
    ),
    "its own exit": Attack(
        "def exit(*_): pass\nquit = exit\ndef attack(): return 2", "if attack() != 1:\n exit(1)\n quit(1)"
    ),
    "a builtin with the name of a method": Attack(
        "def sum(x): return 5\nclass Attack:\n def sum(self, x): return 5",
        "def check(candidate): assert candidate([1, 2]) == sum([1, 2])",
        entry_point="Attack().sum",
    ),
    "nothing, where the tests have a solution": Attack(
        "", "def attack(): return 1\ndef check(candidate): assert candidate() == attack()", entry_point="attack"
    ),
    "failing words that fail": Attack(
        "class Words:\n def __str__(self): raise SystemExit\ndef attack(): return Words()",
        "assert attack() == 1, attack()",
    ),
}

PROGRAMS = {
    "huge output": Attack("while True: print('x' * 10000)", program=True),
    "no output": Attack("import os\nos._exit(0)", program=True),
    "right output, wrong end": Attack("print(1)\nraise ValueError", program=True),
    "looks for what is expected": Attack(
        "import gc, re, sys\ntext = repr(gc.get_objects())\nframe = sys._getframe()\n"
        "while frame: text += repr((frame.f_locals, frame.f_globals)); frame = frame.f_back\n"
        "print(*re.findall(r'needle-\\d+', text))",
        program=True,
    ),
    "closes its output and goes on": Attack(
        "import os\nos.write(1, b'1')\nos.close(1)\nwhile True: pass", program=True
    ),
    "claims on all descriptors": Attack(
        "import os\nfor fd in range(50):\n try: os.write(fd, b'1')\n except OSError: pass\nos._exit(1)", program=True
    ),
}
