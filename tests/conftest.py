"""One thread per worker: the suite runs in parallel processes."""

import torch

torch.set_num_threads(1)

pytest_plugins = ["tests.browser", "tests.app.pages"]
