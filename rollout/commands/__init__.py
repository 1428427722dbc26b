"""What the subcommands of `interlace` do, one file each; `rollout` and `model` are in `cli`."""
