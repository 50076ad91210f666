"""The course's shared code, one room per stage; a room imports only from floors below it."""
import os

# Set before any library reads them. Offline is the default: without it a single
# `from_pretrained("gpt2")` on a machine without a network hangs for most of a minute.
if os.environ.get("COURSE_ASSETS", "packaged") != "hub":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for a GPU must not forbid a fork
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that the driver's card 0 is torch's
