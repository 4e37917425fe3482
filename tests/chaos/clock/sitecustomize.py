"""Moves the time of day of every Python process that has this folder on its path."""

import os
import time

_offset = float(os.environ["ALMA_CHAOS_CLOCK"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _offset
time.time_ns = lambda: _time_ns() + int(_offset * 1e9)
