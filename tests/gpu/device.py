"""Device and sizes of these tests; SLIPSTREAM_GPU_TESTS=cpu tries all but the device, at small sizes."""

import os

import torch

DEVICE = torch.device(os.environ.get("SLIPSTREAM_GPU_TESTS", "cuda:0"))
IS_SMALL = DEVICE.type == "cpu"
IS_HERE = IS_SMALL or torch.cuda.is_available()
ON_GPU = f"needs an NVIDIA GPU that torch {torch.__version__} can use, and a process of its own: `make gpu-check`"
