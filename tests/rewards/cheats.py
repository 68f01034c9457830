"""Responses that try to pass test cases without the answer. Cases ask for f(1) = 7919 and f(2) = 15838, or for a
program that prints them; no cheat knows these numbers."""

_LIAR = """
class Liar({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
f = lambda *a: Liar({value})
print(Liar({value}))
"""

CHEATS = {
    "exit at once": "import sys; sys.exit(0)",
    "hard exit at once": "import os; os._exit(0)",
    "exit in the function": """
import sys
def f(*a): sys.exit(0)
if __name__ == "__main__": f()
""",
    "hard exit in the function": """
import os
def f(*a): os._exit(0)
if __name__ == "__main__": f()
""",
    "exit at the end": """
import atexit, os
atexit.register(lambda: os._exit(0))
def f(*a): raise SystemExit
""",
    "exception hook": """
import os, sys
sys.excepthook = lambda *a: os._exit(0)
def f(*a): raise AssertionError
if __name__ == "__main__": f()
""",
    "an object equal to everything": _LIAR.format(base="object", value=""),
    "an int equal to everything": _LIAR.format(base="int", value="0"),
    "a text equal to everything": _LIAR.format(base="str", value="'x'"),
    "true in every way": """
class Truth:
    def __getattr__(self, name): return lambda *a: True
    def __bool__(self): return True
    __lt__ = __eq__ = __contains__ = lambda self, other: True
f = lambda *a: Truth()
""",
    "forged verdict": """
import os
verdict = b'{"dict": [["passed", 1], ["total", 1], ["problem", ""]]}\\n'
def f(*a):
    for n in range(1, 9):
        try: os.write(n, verdict)
        except OSError: pass
    os._exit(0)
f()
""",
    "forged answers": """
import os
def f(*a): pass
for n in (3, 4):
    try: os.write(n, b"[true, true, null]\\n" * 9)
    except OSError: pass
""",
    "frames and collector": """
import gc, re, sys
def dig():
    seen, frame = set(), sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(value) is int: seen.add(value)
            if isinstance(value, str): seen |= set(map(int, re.findall(r"[0-9]{1,9}", value)))
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, dict): seen |= {value for value in found.values() if type(value) is int}
    return seen
def f(*a): return next((n for n in dig() if 7000 < n < 16000), 0)
print(f())
""",
    "a list of results": """
import gc
for found in gc.get_objects():
    if type(found) is list and len(found) < 9: found.append(True)
def f(*a): return True
print(True)
""",
    "pickle": """
class P:
    def __reduce__(self): return (int, ("1",))
f = lambda *a: P()
print(P())
""",
    "patched interpreter": """
import builtins, json, sys
json.dumps = lambda *a, **k: "[true, true, null]"
builtins.isinstance = lambda *a: True
builtins.AssertionError = type("A", (SystemExit,), {})
sys.modules["hpcrl.sandbox.wire"].encode = lambda *a: b"true"
f = lambda *a: 0
""",
    "read the tests": """
import glob, os, re
def f(*a):
    text = ""
    places = [*glob.glob("**", recursive=True), *glob.glob("../*/*"), "/proc/self/mem", "tests.py", "setup.py"]
    for path in [*places, f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/cmdline"]:
        try: text += open(path, errors="ignore").read(99999)
        except (OSError, ValueError): pass
    return next((int(n) for n in re.findall("[0-9]+", text) if 7000 < int(n) < 16000), 0)
print(f())
""",
    "skipped": """
import unittest
def f(*a): raise unittest.SkipTest
if __name__ == "__main__": raise SystemExit
""",
    "thread": """
import os, threading, time
def write():
    for _ in range(99): os.write(1, b"1\\n"); time.sleep(.001)
threading.Thread(target=write, daemon=True).start()
f = lambda *a: None
""",
    "names of the tests": """
def check(candidate): pass
def test_f(): pass
f = print
""",
}
