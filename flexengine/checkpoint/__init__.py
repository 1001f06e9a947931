"""Files in and out: safetensors checkpoints of Hugging Face folders, and downloads from the hub.

Checkpoints: reader.py and writer.py move tensors between a folder (layout.py names its files) and memory the caller
owns; safetensors_format.py is the format they share, atomic.py the write-beside-and-rename everything relies on.
Downloads: download.py is the command line, hub.py fetches and verifies files (hub_errors.py explains
failures), manifest.py records them,
dataset_files.py picks a split's files, dataset_rows.py turns them into JSON lines.
Import the modules directly: this one stays empty so that a download starts without loading torch.
"""
