"""Writes what TensorFlow's native code writes, a warning, and a progress bar."""

import os
import time

INFO = b"I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on. \n"
PREFACE = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
)
os.write(2, PREFACE + INFO + b"W0000 00:00:1795359673.039961   13910 gpu.cc:1] no GPU\n")
os.write(2, b"\rbar 1")
time.sleep(0.1)
os.write(2, b"\rbar 2\nend\n")
