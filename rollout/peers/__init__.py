"""Other engines on the same work: who is sooner, by how much, and at what cost."""
