"""In place of the package torch_memory_saver, in processes that `python -m bfcd.sglang` started and in theirs.

SPDX-License-Identifier: Apache-2.0
"""

from bfcd.sglang import TorchMemorySaver as TorchMemorySaver
from bfcd.sglang import configure_subprocess as configure_subprocess
from bfcd.sglang import torch_memory_saver as torch_memory_saver
