"""A slow disk, with this folder in PYTHONPATH: os.pwrite takes the seconds of the file $HPCRL_TEST_PACE."""

import os
import time
from pathlib import Path

_write = os.pwrite


def _write_slowly(*words):  # type: ignore[no-untyped-def]
    time.sleep(float(Path(os.environ["HPCRL_TEST_PACE"]).read_text()))
    return _write(*words)


os.pwrite = _write_slowly
