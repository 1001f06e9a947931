"""Files in and out: safetensors checkpoints of Hugging Face folders, and downloads from the hub.

Checkpoints: reader.py and writer.py move tensors between a folder (layout.py names its files) and memory the caller
owns; safetensors_format.py is the format they share, staged_folder.py lets a folder's files appear together, and
atomic.py is the write-beside-and-rename of a single file. tokenizer_files.py reads a tokenizer, and writes it with
tokens that were added.
Downloads: download.py is the command line, hub_listing.py lists a repository, hub.py fetches its files, each by
hub_file.py (hub_errors.py explains failures), manifest.py records them,
dataset_files.py picks a split's files, dataset_rows.py turns them into JSON lines.
Import the modules directly: this one stays empty so that a download starts without loading torch.
"""
