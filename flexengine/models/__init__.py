"""What the network is: layers of ops, parameter groups, and what a tensor is called in a Hugging Face file."""
