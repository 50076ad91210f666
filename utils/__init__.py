"""What every lesson imports: the machine, the lesson, what is shown, artifacts and assets."""

import os

# As the reader's shell left them, for programs of hers that no lesson runs in.
SURROUNDINGS = dict(os.environ)

# These are set before any library reads them. Offline is the default, because without it a single
# `from_pretrained("gpt2")` on a machine without a network hangs for most of a minute.
if os.environ.get("COURSE_ASSETS", "packaged") != "hub":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# To ask whether there is a GPU must not make a CUDA context: a kernel that has one cannot be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# The driver's card 0 must be torch's card 0.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
