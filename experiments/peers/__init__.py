"""What runs inside the environments of other engines, and what installs them there."""
