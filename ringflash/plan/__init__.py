"""What the TPU compiler says, with no TPU at hand: it runs in a child process and is only ever read."""
