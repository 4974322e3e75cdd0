"""ringflash: train and evaluate language models on sequences too long for one accelerator."""

__version__ = "0.1.0"
